"""Plain-torch operations on draft trees: best children, stable selection, ancestor masks, the accept walk.

All of them break ties by the lower index, read nothing on the host and have shapes that depend on
arguments alone, so that they can be captured in a CUDA graph. Legend: B rows, M nodes, V vocabulary,
k children a node, D tree nodes, W the most tokens a cycle emits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.errors import ConfigError


class Pool(NamedTuple):
    """All candidates of a growth in flat order, N = k + (S-1) k^2, filled level by level."""

    tokens: Tensor  # [B, N] int64
    values: Tensor  # [B, N] float, sums of log-values, 0 or below
    fed: Tensor  # [B, 1 + k (S-1)] int64: the candidate on which each group of k hangs; 0 for group 0

    @staticmethod
    def empty(values: Tensor, levels: int) -> Pool:
        """Memory for `levels` levels of `values`' rows, k [B, k], dtype and device."""
        rows, k = values.shape
        tokens = values.new_empty(rows, level_start(levels + 1, k), dtype=torch.int64)
        fed = tokens.new_empty(rows, 1 + k * (levels - 1))
        return Pool(tokens, torch.empty_like(tokens, dtype=values.dtype), fed)


class BeamState(NamedTuple):
    """The k nodes of a level that get children; `grow.Beam` says what the fields hold."""

    tokens: Tensor  # [B, k] int64
    values: Tensor  # [B, k] float
    parent_slot: Tensor  # [B, k] int64
    flat: Tensor  # [B, k] int64
    mask: Tensor  # [B, k] int64
    path_tokens: Tensor  # [B, k, level] int64


def level_start(level: int, k: int) -> int:
    """The first flat number of a level: 0, k, k + k^2, ..."""
    return 0 if level == 1 else k + (level - 2) * k * k


def log_values(values: Tensor) -> Tensor:
    """NaN as -inf, and nothing above 0: what the argument for connected trees needs."""
    return torch.nan_to_num(values.clamp(max=0), nan=-math.inf, posinf=0.0, neginf=-math.inf)


def stable_top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last dimension, in descending order, ties to the lower index.

    `values` [..., N] hold no NaN. Returns values [..., k] and int64 indices [..., k].
    `torch.topk` promises no order among ties, and a tie decided for a child can orphan it.
    """
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[..., :k], ordered.indices[..., :k]


def top_children(scores: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens of highest score at each node, ties to the lower token id, NaN as -inf.

    scores, values [..., V] float -> tokens [..., k] int64 and the values at these tokens [..., k].
    The k best elements lie in the k contiguous chunks of highest maximum (ties to the earlier chunk), so
    one pass for the maxima and two small stable sorts replace a sort of the whole vocabulary.
    """
    vocab = scores.shape[-1]
    if k > vocab:
        raise ConfigError(f"--topk {k} is above the vocabulary of {vocab}; use {vocab} or less")
    size = 128 if vocab >= 16384 else 32  # chunk lengths measured as fastest on a CPU
    clean = torch.nan_to_num(scores, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if vocab % size:
        clean = F.pad(clean, (0, -vocab % size), value=-math.inf)
    chunks = clean.view(*clean.shape[:-1], -1, size)  # [..., V / size, size]
    _, best = stable_top(chunks.amax(-1), min(k, chunks.shape[-2]))
    best = torch.sort(best, dim=-1).values  # ascending, so that the order of positions is that of token ids
    near = chunks.gather(-2, best.unsqueeze(-1).expand(*best.shape, size)).flatten(-2)  # [..., k * size]
    _, place = stable_top(near, k)
    tokens = best.gather(-1, place // size) * size + place % size
    return tokens, values.gather(-1, tokens)


def expand(
    tokens: Tensor, values: Tensor, beam: BeamState | None, pool: Pool, level: int
) -> BeamState | None:
    """Enter level `level`'s candidates into `pool` and return the beam that they give, or None at the last.

    tokens [B, m, k] int64 and log-values [B, m, k], m = 1 at level 1, else k (slot of the parent, rank);
    `beam` is the one whose children they are, None at level 1. Level 1's beam is all of its k in the order
    given, a later level's the k best of k^2, ties to the lower number.
    """
    rows, _, k = tokens.shape
    start = level_start(level, k)
    entries = torch.arange((level - 1) * k, level * k, device=tokens.device)
    total, level_tokens = log_values(values), tokens.flatten(1)
    if beam is not None:
        total = beam.values.unsqueeze(-1) + total
    total = total.flatten(1)
    pool.tokens[:, start : start + level_tokens.shape[1]] = level_tokens
    pool.values[:, start : start + total.shape[1]] = total
    if beam is None:
        pool.fed[:, 0] = 0
    if 1 + level * k > pool.fed.shape[1]:
        return None
    own = torch.bitwise_left_shift(torch.ones_like(entries), entries)
    if beam is None:
        best, place = total, entries.expand(rows, -1)
        parent, mask = torch.zeros_like(place), own.expand(rows, -1)
        above = level_tokens.new_empty(rows, k, 0)
    else:
        best, place = stable_top(total, k)
        parent = place // k
        mask = beam.mask.gather(1, parent) | own
        above = beam.path_tokens.gather(1, parent.unsqueeze(-1).expand(-1, -1, level - 1))
    chosen, flat = level_tokens.gather(1, place), place + start
    pool.fed[:, 1 + (level - 1) * k : 1 + level * k] = flat
    return BeamState(chosen, best, parent, flat, mask, torch.cat((above, chosen.unsqueeze(-1)), dim=-1))


def chosen_candidates(pool: Pool, count: int) -> Tensor:
    """Flat numbers [B, count] of the best candidates of all levels, ascending; ties to the lower number."""
    _, best = stable_top(pool.values, count)
    return torch.sort(best, dim=1).values


def rerank(root: Tensor, pool: Pool, k: int, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tree of `root` [B] int64 and the nodes-1 best candidates of a full pool.

    Returns tokens, parents, depth, mask [B, D] int64 and logp [B, D] of the pool's dtype.
    """
    chosen = chosen_candidates(pool, nodes - 1)
    levels = 1 + (pool.fed.shape[1] - 1) // k
    zero = torch.zeros_like(chosen[:, :1])
    group = chosen // k
    above = pool.fed.gather(1, group)  # [B, D-1]
    rank = (chosen.unsqueeze(1) < above.unsqueeze(2)).sum(dim=2)  # chosen is sorted: place of the parent
    parents = torch.cat((zero - 1, torch.where(group == 0, 0, rank + 1)), dim=1)
    return (
        torch.cat((root.unsqueeze(1), pool.tokens.gather(1, chosen)), dim=1),
        parents,
        torch.cat((zero, torch.where(chosen < k, 1, 2 + (chosen - k) // k**2)), dim=1),
        ancestor_masks(parents, min(levels, nodes - 1)),
        torch.cat((torch.zeros_like(pool.values[:, :1]), pool.values.gather(1, chosen)), dim=1),
    )


def ancestor_masks(parents: Tensor, levels: int) -> Tensor:
    """Bit sets of each node's ancestors and itself; bit = node number, root included.

    parents [B, D] int64 with -1 at the root, no node deeper than `levels`; D <= 64. Returns [B, D] int64
    (bit 63 is the sign bit).
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    bits = torch.bitwise_left_shift(torch.ones_like(nodes), nodes)
    up = parents.clamp(min=0)
    node = nodes.expand_as(parents)
    mask = bits.expand_as(parents)
    for _ in range(levels):
        node = up.gather(1, node)
        mask = mask | bits[node]
    return mask


def accept_walk(tokens: Tensor, parents: Tensor, target_tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Walk from the root to the child that carries the target's token, as long as there is one.

    tokens, parents, target_tokens [B, D] int64 -> path [B, width] of node numbers (entries after the end
    repeat the last node) and length [B], the nodes walked over, root included. Siblings carry distinct
    tokens, so at most one child matches.
    """
    here = torch.zeros_like(tokens[:, :1])  # [B, 1]
    path = [here]
    length = torch.ones_like(tokens[:, 0])
    for _ in range(width - 1):
        match = (parents == here) & (tokens == target_tokens.gather(1, here))  # [B, D]
        found, child = match.max(dim=1, keepdim=True)
        here = torch.where(found, child, here)
        path.append(here)
        length = length + found[:, 0]
    return torch.cat(path, dim=1), length


def accept_path(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`accept_walk` and the tokens [B, width] that the target chose after each node of the path."""
    path, length = accept_walk(tokens, parents, target_tokens, width)
    return path, length, target_tokens.gather(1, path)
