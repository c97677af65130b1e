"""Choice of experts on a GPU in two launches: the logits in parts over the hidden dimension, then the choice.

A router is a skinny product (256 x 7168 for a handful of tokens), which only reads its weight at full speed
when the hidden dimension is spread over the SMs too. kernels/ref/router.py is the definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import DECODE_TOKENS, launch_options, prefetch, sectors, wait_for_inputs
from nextn.kernels.ref.router import MAX_EXPERTS, Method, Scoring


class RouterConfig(NamedTuple):
    """How the logits' product is cut up."""

    block_tokens: int
    block_experts: int
    block_hidden: int
    splits: int  # programs along the hidden dimension
    warps: int
    stages: int


def choose_config(tokens: int, hidden: int) -> RouterConfig:
    """Decode spreads the weight over all SMs; a long prefill has tokens enough for that."""
    if tokens <= DECODE_TOKENS:
        splits = min(14, triton.cdiv(hidden, 128))
        return RouterConfig(16, 32, 128, splits, 4, 4)
    if tokens <= 1024:
        return RouterConfig(64, 64, 64, min(4, triton.cdiv(hidden, 64)), 4, 3)
    return RouterConfig(128, 64, 64, 1, 4, 3)


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    *,
    scoring: Scoring,
    method: Method,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
    config: RouterConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, best first.  # [N, k] float32, [N, k] int64

    x [N, hidden] bfloat16 (rows may be apart), weight [experts, hidden] bfloat16 or float32, bias [experts]
    float32. Products are exact and summed in float32. Tokens not `valid` [N] get weights 0 and numbers -1.
    """
    tokens, hidden = x.shape
    experts = weight.shape[0]
    groups = 1 if method == "greedy" else n_group
    assert x.dtype == torch.bfloat16, f"x must be bfloat16, is {x.dtype}"
    assert x.stride(1) == 1, "a token's columns must be adjacent"
    assert weight.dtype in (torch.bfloat16, torch.float32), f"a router's weight cannot be {weight.dtype}"
    assert weight.shape[1] == hidden, f"weight has {weight.shape[1]} columns, x has {hidden}"
    assert weight.is_contiguous(), "the router's weight must be contiguous"
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32), (
        f"bias must be [{experts}] float32"
    )
    assert valid is None or valid.shape == (tokens,), f"valid must be [{tokens}]"
    assert experts % groups == 0, f"{experts} experts are not {groups} groups of one size"
    assert experts <= MAX_EXPERTS, f"at most {MAX_EXPERTS} experts, not {experts}"
    assert groups == 1 or method != "noaux_tc" or experts > groups, "noaux_tc needs two experts a group"
    kept = experts if groups == 1 else experts // groups * topk_group
    assert top_k <= kept, f"{top_k} experts are wanted of {kept}"
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    indices = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    if tokens == 0:
        return weights, indices
    config = config or choose_config(tokens, hidden)
    steps = triton.cdiv(hidden, config.block_hidden * config.splits)
    logits = torch.empty(config.splits, tokens, experts, dtype=torch.float32, device=x.device)
    grid = (
        triton.cdiv(experts, config.block_experts),
        config.splits,
        triton.cdiv(tokens, config.block_tokens),
    )
    _logits_kernel[grid](
        x,
        weight,
        logits,
        tokens,
        experts,
        x.stride(0),
        HIDDEN=hidden,
        STEPS=steps,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_EXPERTS=config.block_experts,
        BLOCK_HIDDEN=config.block_hidden,
        PREFETCH=tokens <= DECODE_TOKENS,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(),
    )
    _choose_kernel[(tokens,)](
        logits,
        None if bias is None else bias.contiguous(),
        None if valid is None else valid.contiguous(),
        weights,
        indices,
        tokens,
        float(scaling),
        SPLITS=config.splits,
        GROUPS=groups,
        GROUP_SIZE=experts // groups,
        KEPT_GROUPS=min(topk_group, groups),
        TWO_BEST=method == "noaux_tc",
        SIGMOID=scoring == "sigmoid",
        NORMALISE=norm_topk_prob,
        TOP_K=top_k,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        SIZE_BLOCK=triton.next_power_of_2(experts // groups),
        TOP_BLOCK=triton.next_power_of_2(top_k),
        num_warps=1,
        **launch_options(),
    )
    return weights, indices


@triton.jit(do_not_specialize=["tokens"])  # or each prompt's length compiles anew
def _logits_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    logits_ptr,
    tokens,
    experts,
    x_stride,
    HIDDEN: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    split = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.minimum(expert, experts - 1).to(tl.int64)  # beyond the last: computed and not stored
    if PDL and PREFETCH:  # weights are no kernel's output
        within = sectors(BLOCK_HIDDEN, weight_ptr.dtype.element_ty.primitive_bitwidth)
        for step in range(STEPS):
            place = tl.minimum((split * STEPS + step) * BLOCK_HIDDEN + within, HIDDEN - 1)
            prefetch(weight_ptr + row[:, None] * HIDDEN + place[None, :])
    wait_for_inputs(PDL)
    column = split * STEPS * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    weight_ptrs = weight_ptr + row[:, None] * HIDDEN + column[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    sums = tl.zeros((BLOCK_EXPERTS, BLOCK_TOKENS), tl.float32)
    for step in range(STEPS):
        here = column + step * BLOCK_HIDDEN < HIDDEN
        weight = tl.load(weight_ptrs, mask=here[None, :], other=0.0)
        x = tl.trans(tl.load(x_ptrs, mask=(token < tokens)[:, None] & here[None, :], other=0.0))
        if weight.dtype == tl.bfloat16:
            sums = tl.dot(weight, x, sums)
        else:
            # Three bfloat16 numbers hold all digits of a float32, and their products with x are exact.
            first = weight.to(tl.bfloat16)
            rest = weight - first.to(tl.float32)
            second = rest.to(tl.bfloat16)
            third = (rest - second.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(third, x, sums)
            sums = tl.dot(second, x, sums)
            sums = tl.dot(first, x, sums)
        weight_ptrs += BLOCK_HIDDEN
        x_ptrs += BLOCK_HIDDEN
    place = (split.to(tl.int64) * tokens + token[None, :]) * experts + expert[:, None]
    tl.store(logits_ptr + place, sums, mask=(expert < experts)[:, None] & (token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    valid_ptr,
    weights_ptr,
    indices_ptr,
    tokens,
    scaling,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: experts in a square of groups and members, padded to powers of two."""
    EXPERTS: tl.constexpr = GROUPS * GROUP_SIZE
    group = tl.arange(0, GROUPS_BLOCK)
    member = tl.arange(0, SIZE_BLOCK)
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    real = (group < GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    logits = tl.zeros((GROUPS_BLOCK, SIZE_BLOCK), tl.float32)
    for split in tl.static_range(SPLITS):
        part_ptr = logits_ptr + (split * tokens + token) * EXPERTS
        logits += tl.load(part_ptr + expert, mask=real, other=0.0)
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        logits = tl.where(real, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(tl.sum(powers, 1), 0))
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0)
    keys = _ranking_key(choice, expert)
    # Below every key of an expert; experts out of the kept groups are never reached, so they need no order.
    NOTHING: tl.constexpr = -(2**63)
    keys = tl.where(real, keys, NOTHING)
    if KEPT_GROUPS < GROUPS:
        best = tl.max(keys, 1)
        group_score = tl.max(tl.where(keys == best[:, None], choice, float("-inf")), 1)
        if TWO_BEST:
            others = tl.where(keys == best[:, None], NOTHING, keys)
            second = tl.max(others, 1)
            group_score += tl.max(tl.where(others == second[:, None], choice, float("-inf")), 1)
        group_keys = tl.where(group < GROUPS, _ranking_key(group_score, group), NOTHING)
        kept = tl.zeros((GROUPS_BLOCK,), tl.int1)
        for _ in tl.static_range(KEPT_GROUPS):
            taken = group_keys == tl.max(group_keys, 0)
            kept = kept | taken
            group_keys = tl.where(taken, NOTHING, group_keys)
        keys = tl.where(kept[:, None], keys, NOTHING)
    slot = tl.arange(0, TOP_BLOCK)
    weights = tl.zeros((TOP_BLOCK,), tl.float32)
    indices = tl.zeros((TOP_BLOCK,), tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.max(keys, 1), 0)
        taken = keys == best
        score = tl.sum(tl.sum(tl.where(taken, scores, 0.0), 1), 0)
        weights = tl.where(slot == i, score, weights)
        indices = tl.where(slot == i, _number_of(best), indices)
        keys = tl.where(taken, NOTHING, keys)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (tl.sum(weights, 0) + 1e-20))
    weights = weights * scaling
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + token) != 0
        weights = tl.where(valid, weights, 0.0)
        indices = tl.where(valid, indices, -1)
    tl.store(weights_ptr + token * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(indices_ptr + token * TOP_K + slot, indices, mask=slot < TOP_K)


@triton.jit
def _ranking_key(values, numbers):  # type: ignore[no-untyped-def]
    """int64 keys ordered as (value, then the lower number); distinct for distinct numbers, NaN lowest."""
    bits = tl.where(values == values, values, float("-inf")).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)


@triton.jit
def _number_of(key):  # type: ignore[no-untyped-def]
    """The number in a key of `_ranking_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)
