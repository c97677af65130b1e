"""Plain-torch operations on draft trees: best children, stable selection, ancestor masks, the accept walk.

All of them break ties by the lower index, read nothing on the host and have shapes that depend on
arguments alone, so that they can be captured in a CUDA graph. Legend: B rows, M nodes, V vocabulary,
k children a node, D tree nodes, W the most tokens a cycle emits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.errors import ConfigError


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
