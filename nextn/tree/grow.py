"""Growth of an EAGLE-2 draft tree (arXiv 2406.16858, sections 4.1 and 4.2), level by level; no model here.

Each level keeps a beam of k nodes, each beam node gets k children, and the next beam is the k best of
these k^2 by the sum of log-values along the path. At the end the D-1 best candidates of all levels form
the tree. The draft loop is

    growth = grow.start(tokens, values, spec)          # level 1: the root's k children [B, k]
    while growth.level < spec.num_steps:
        beam = growth.beam()                           # run the model on beam.tokens, k nodes a row
        growth.extend(*grow.top_children(scores, values, k))      # [B, k, k]: beam slot, rank
    tree = growth.rerank(root)                         # root [B] -> DraftTree

Flat numbering of candidates: level 1 is 0 .. k-1 in the order given (descending score); level l >= 2 is
k + (l-2) k^2 + (beam slot) k + rank. So candidate f lies in group f // k; group 0 hangs on the root and
group g >= 1 on the g-th entry, counting from 1, of the concatenated beams. Ties go to the lower flat
index, which is the shallower one, so a child never displaces its parent and no node is an orphan.

Values are log-probabilities: NaN counts as -inf, and anything above 0 as 0 (a child cannot outrank its
parent). Legend: B rows, k = spec.topk, S = spec.num_steps, D = spec.draft_tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.kernels.ref.tree_ops import ancestor_masks, stable_top, top_children
from nextn.tree.tree import DraftTree

__all__ = ["Beam", "Growth", "start", "top_children"]


@dataclass(frozen=True, slots=True)
class Beam:
    """The k nodes of one level that get children.

    They fill entries `start` .. `start + k - 1` of the draft's step buffer of k (S-1) entries: slot s of
    level l is entry (l-1) k + s.
    """

    level: int
    start: int
    tokens: Tensor  # [B, k] int64
    values: Tensor  # [B, k] float, sums of log-values, descending from level 2 on
    parent_slot: Tensor  # [B, k] int64, slot in the previous beam; 0 at level 1, whose parent is the root
    flat: Tensor  # [B, k] int64, candidate numbers
    mask: Tensor  # [B, k] int64 over the step buffer's entries: ancestors below the root and itself
    path_tokens: Tensor  # [B, k, level] int64, tokens from level 1 down to the node itself

    @property
    def path_valid(self) -> Tensor:
        """[B, k, level] bool, all true: the companion that `process_logits` takes with `path_tokens`."""
        return torch.ones_like(self.path_tokens, dtype=torch.bool)


def start(tokens: Tensor, values: Tensor, spec: SpecConfig) -> Growth:
    """Begin with the root's children: tokens [B, k] int64, values [B, k] log-probabilities."""
    return Growth(tokens, values, spec)


class Growth:
    """Candidates and beams of trees that grow together; `level` counts the levels so far."""

    def __init__(self, tokens: Tensor, values: Tensor, spec: SpecConfig) -> None:
        k = spec.topk
        assert tokens.shape == values.shape == (tokens.shape[0], k)
        values = _log_values(values)
        slots = torch.arange(k, device=tokens.device).expand_as(tokens)
        self.spec = spec
        self.level = 1
        self._tokens = [tokens]
        self._values = [values]
        self._beams: list[Beam] = []
        if self.level < spec.num_steps:
            self._beams.append(
                Beam(
                    level=1,
                    start=0,
                    tokens=tokens,
                    values=values,
                    parent_slot=torch.zeros_like(slots),
                    flat=slots,
                    mask=torch.bitwise_left_shift(torch.ones_like(slots), slots),
                    path_tokens=tokens.unsqueeze(-1),
                )
            )

    def beam(self) -> Beam:
        """The nodes to run through the draft model next; there is none once `level` is S."""
        assert self.level < self.spec.num_steps, "the last level has no beam"
        return self._beams[-1]

    def extend(self, tokens: Tensor, values: Tensor) -> None:
        """Add the beam's children, [B, k, k] (slot, rank): distinct tokens and their log-probabilities."""
        beam = self.beam()
        total = (beam.values.unsqueeze(-1) + _log_values(values)).flatten(1)  # [B, k * k]
        self._tokens.append(tokens.flatten(1))
        self._values.append(total)
        self.level += 1
        if self.level < self.spec.num_steps:
            self._beams.append(self._next_beam(beam, self._tokens[-1], total))

    def _next_beam(self, beam: Beam, tokens: Tensor, values: Tensor) -> Beam:
        """The k best of this level's k^2 candidates, given as [B, k * k]."""
        k = self.spec.topk
        best, place = stable_top(values, k)
        parent = place // k
        chosen = tokens.gather(1, place)
        entries = torch.arange(k, device=tokens.device) + beam.start + k
        own = torch.bitwise_left_shift(torch.ones_like(entries), entries)
        above = beam.path_tokens.gather(1, parent.unsqueeze(-1).expand(-1, -1, beam.level))
        return Beam(
            level=self.level,
            start=beam.start + k,
            tokens=chosen,
            values=best,
            parent_slot=parent,
            flat=place + k + beam.start * k,
            mask=beam.mask.gather(1, parent) | own,
            path_tokens=torch.cat((above, chosen.unsqueeze(-1)), dim=-1),
        )

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Tokens and values of all candidates so far, [B, N] in flat order."""
        return torch.cat(self._tokens, dim=1), torch.cat(self._values, dim=1)

    def chosen(self) -> Tensor:
        """Flat numbers [B, D-1] of the best candidates of all levels, ascending: node i is entry i-1."""
        _, best = stable_top(torch.cat(self._values, dim=1), self.spec.draft_tokens - 1)
        return torch.sort(best, dim=1).values

    def rerank(self, root: Tensor) -> DraftTree:
        """The tree of `root` [B] int64 and the D-1 best candidates; needs all S levels."""
        assert self.level == self.spec.num_steps, "the tree is not fully grown"
        k, chosen = self.spec.topk, self.chosen()
        tokens, values = self.candidates()
        zero = torch.zeros_like(chosen[:, :1])
        group = chosen // k
        fed = torch.cat([zero, *(beam.flat for beam in self._beams)], dim=1)  # parent candidate of each group
        above = fed.gather(1, group)  # [B, D-1]
        rank = (chosen.unsqueeze(1) < above.unsqueeze(2)).sum(dim=2)  # chosen is sorted: place of the parent
        parents = torch.cat((zero - 1, torch.where(group == 0, 0, rank + 1)), dim=1)
        levels = min(self.spec.num_steps, self.spec.draft_tokens - 1)
        return DraftTree(
            tokens=torch.cat((root.unsqueeze(1), tokens.gather(1, chosen)), dim=1),
            parents=parents,
            depth=torch.cat((zero, torch.where(chosen < k, 1, 2 + (chosen - k) // k**2)), dim=1),
            mask=ancestor_masks(parents, levels),
            logp=torch.cat((torch.zeros_like(values[:, :1]), values.gather(1, chosen)), dim=1),
            levels=levels,
        )


def _log_values(values: Tensor) -> Tensor:
    """NaN as -inf, and nothing above 0: what the argument for connected trees needs."""
    return torch.nan_to_num(values.clamp(max=0), nan=-math.inf, posinf=0.0, neginf=-math.inf)
