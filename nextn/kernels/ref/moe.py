"""Routed experts: SwiGLU networks of which each token runs the few that its router chose.

Weights of all experts are fused: w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I]. A loop over the
experts that are hit suits a CPU and large prefills; gathering the chosen experts' weights never asks the host
and so suits a captured decode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.gemm import Block, dequantize, linear

GATHERED_PAIRS = 64
"""Token-expert pairs whose weights are gathered at once: a bound on memory, not on batch size."""


class ExpertWeights(NamedTuple):
    """Fused weights of one layer's experts, plain or FP8 with one scale a block."""

    w13: Tensor  # [E, 2I, H]
    w2: Tensor  # [E, H, I]
    scale13: Tensor | None  # [E, row blocks of 2I, column blocks of H] float32
    scale2: Tensor | None  # [E, row blocks of H, column blocks of I] float32
    block: Block

    def pick(self, experts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies of the weights of experts [n], dequantised.  # [n, 2I, H], [n, H, I]"""
        w13, w2 = _select(self.w13, experts), _select(self.w2, experts)
        if self.scale13 is not None and self.scale2 is not None:
            w13 = dequantize(w13, self.scale13[experts], self.block, dtype)
            w2 = dequantize(w2, self.scale2[experts], self.block, dtype)
        return w13, w2


class SharedExperts(NamedTuple):
    """Fused weights of the experts that every token runs, as one network of width Is."""

    w13: Tensor  # [2Is, H], gate rows, then up rows
    w2: Tensor  # [H, Is]
    scale13: Tensor | None  # as ExpertWeights', with the same block
    scale2: Tensor | None

    def parts(self, experts: ExpertWeights) -> int:
        """Into how many networks of the routed experts' width these split; 1 where that does not work out.

        A part of FP8 columns must not start inside of a block.
        """
        width, total = experts.w2.shape[-1], self.w2.shape[-1]
        whole_blocks = self.scale2 is None or width % experts.block[1] == 0
        return total // width if total % width == 0 and whole_blocks else 1


def silu_and_mul(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half.  # [..., 2I] -> [..., I]"""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def routed_experts(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, valid: Tensor | None, *, host: bool
) -> Tensor:
    """Weighted sum of each token's experts.  # [N, H], x's dtype

    x [N, H], weights [N, k] in float32 or float64, indices [N, k] int64. Tokens not `valid` [N] run no
    expert and get zeros (their x must be finite). `host` allows reading the choice on the host.
    """
    if valid is not None:
        weights = torch.where(valid.unsqueeze(-1), weights, 0)
    if host or not x.is_cuda:
        return loop_over_experts(x, weights, indices, experts, valid)
    return gather_experts(x, weights, indices, experts, valid)


def moe_summands(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertWeights,
    shared: SharedExperts | None,
) -> Tensor:
    """Every token's experts one by one.  # [k + parts, N, H], x's dtype

    x [N, H], weights [N, k], indices [N, k] int64, distinct in a row. Summand j < k is weights[:, j] times
    the expert's output, undefined (here 0) where indices is -1; the last `shared.parts` are the shared
    experts' parts.
    """
    top_k, wide = indices.shape[-1], accumulation_dtype(x.dtype)
    shares = [] if shared is None else _shared_summands(x, shared, shared.parts(experts), experts.block)
    out = x.new_zeros(top_k + len(shares), *x.shape, dtype=wide)
    for j, numbers in enumerate(indices.unbind(1)):
        for number in numbers.unique().tolist():
            if number >= 0:
                rows = numbers == number
                out[j, rows] = weights[rows, j, None].to(wide) * _run_experts((x[rows],), [number], experts)
    for part, share in enumerate(shares):
        out[top_k + part] = share
    return out.to(x.dtype)


def shared_experts(x: Tensor, shared: SharedExperts, block: Block) -> Tensor:
    """All shared experts as the one wide network that they are.  # [N, H], x's dtype"""
    hidden = silu_and_mul(linear(x, shared.w13, shared.scale13, block))
    return linear(hidden, shared.w2, shared.scale2, block)


def _shared_summands(x: Tensor, shared: SharedExperts, parts: int, block: Block) -> list[Tensor]:
    """The shared experts' output in parts, each from as many of the intermediate columns."""
    hidden = silu_and_mul(linear(x, shared.w13, shared.scale13, block))
    w2 = shared.w2 if shared.scale2 is None else dequantize(shared.w2, shared.scale2, block, x.dtype)
    return [F.linear(h, w) for h, w in zip(hidden.chunk(parts, 1), w2.chunk(parts, 1), strict=True)]


def loop_over_experts(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, valid: Tensor | None
) -> Tensor:
    """Run each expert that is hit once, over all of its tokens. Reads the counts on the host."""
    top_k, total = indices.shape[-1], experts.w13.shape[0]
    chosen = indices if valid is None else torch.where(valid.unsqueeze(-1), indices, total)
    chosen = chosen.flatten()
    order = chosen.argsort()  # pairs by expert; those of invalid tokens last
    counts = chosen.bincount(minlength=total)[:total].tolist()
    pairs = order if valid is None else order[: sum(counts)]
    tokens = pairs // top_k
    hit = [(number, count) for number, count in enumerate(counts) if count]
    out = x.new_zeros(x.shape, dtype=weights.dtype)
    if hit:
        parts = torch.split(x[tokens], [count for _, count in hit])
        results = _run_experts(parts, [number for number, _ in hit], experts)
        out.index_add_(0, tokens, results * weights.flatten()[pairs].unsqueeze(-1))
    return out.to(x.dtype)


def _run_experts(parts: tuple[Tensor, ...], numbers: list[int], experts: ExpertWeights) -> Tensor:
    """Each expert's output for its own rows, end to end; one activation for all of them."""
    block = experts.block

    def run(rows: Tensor, weight: Tensor, scale: Tensor | None, number: int) -> Tensor:
        return linear(rows, weight[number], None if scale is None else scale[number], block)

    wide = [run(rows, experts.w13, experts.scale13, n) for rows, n in zip(parts, numbers, strict=True)]
    hidden = torch.split(silu_and_mul(torch.cat(wide)), [len(rows) for rows in parts])
    narrow = [run(rows, experts.w2, experts.scale2, n) for rows, n in zip(hidden, numbers, strict=True)]
    return torch.cat(narrow)


def gather_experts(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, valid: Tensor | None
) -> Tensor:
    """Run each token-expert pair on a copy of its expert's weights, `GATHERED_PAIRS` at a time; no host read.

    Invalid tokens take the first valid token's experts, so that they touch no further weights.
    """
    if valid is not None:
        # index_select, because indexing with a single number would read it on the host.
        first = indices.index_select(0, valid.int().argmax(0, keepdim=True))
        indices = torch.where(valid.unsqueeze(-1), indices, first)
    top_k = indices.shape[-1]
    parts = []
    for start in range(0, indices.numel(), GATHERED_PAIRS):
        numbers = indices.flatten()[start : start + GATHERED_PAIRS]
        tokens = torch.arange(start, start + numbers.shape[0], device=x.device) // top_k
        w13, w2 = experts.pick(numbers, x.dtype)
        hidden = silu_and_mul(torch.bmm(x[tokens].unsqueeze(1), w13.transpose(1, 2)))
        parts.append(torch.bmm(hidden, w2.transpose(1, 2)).squeeze(1))
    results = torch.cat(parts).view(*indices.shape, -1).to(accumulation_dtype(x.dtype))  # [N, k, H]
    return torch.bmm(weights.unsqueeze(1), results).squeeze(1).to(x.dtype)


def _select(weight: Tensor, experts: Tensor) -> Tensor:
    """weight[experts]; FP8 goes by its bytes, for which indexing is defined on every device."""
    if weight.element_size() == 1:
        return weight.view(torch.uint8)[experts].view(weight.dtype)
    return weight[experts]
