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

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.kernels.ops import expand, rerank
from nextn.kernels.ref.tree_ops import Pool, top_children
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
        assert tokens.shape == values.shape == (tokens.shape[0], spec.topk), (
            f"the root has {spec.topk} children a row, and a value for each"
        )
        self.spec = spec
        self.level = 1
        self._pool = Pool.empty(values, spec.num_steps)
        self._beam = expand(tokens.unsqueeze(1), values.unsqueeze(1), None, self._pool, self.level)

    def beam(self) -> Beam:
        """The nodes to run through the draft model next; there is none once `level` is S."""
        assert self._beam is not None, "the last level has no beam"
        start = (self.level - 1) * self.spec.topk
        return Beam(level=self.level, start=start, **self._beam._asdict())

    def extend(self, tokens: Tensor, values: Tensor) -> None:
        """Add the beam's children, [B, k, k] (slot, rank): distinct tokens and their log-probabilities."""
        assert self._beam is not None, "the last level has no children"
        self.level += 1
        self._beam = expand(tokens, values, self._beam, self._pool, self.level)

    def rerank(self, root: Tensor) -> DraftTree:
        """The tree of `root` [B] int64 and the D-1 best candidates; needs all S levels."""
        assert self.level == self.spec.num_steps, "the tree is not fully grown"
        nodes = self.spec.draft_tokens
        levels = min(self.spec.num_steps, nodes - 1)
        return DraftTree(*rerank(root, self._pool, self.spec.topk, nodes), levels=levels)
