"""The mixture's experts on a GPU: two grouped products over only those experts that tokens chose.

A *block* is one expert with up to `block_tokens` of its pairs (a pair is a token with one of its choices);
the last blocks are the shared experts', which all tokens run. Few tokens' programs find their work from the
router's choice themselves, more get a list of blocks from a launch or two. Grids are bounds from shapes, and
programs without work exit. kernels/ref/moe.py is the definition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.fp8 import widen
from nextn.kernels.launch import DECODE_TOKENS, EARLY, launch_options, prefetch, sectors, wait_for_inputs
from nextn.kernels.ref.gemm import FP8, Block, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts

UNLISTED_TOKENS = 16  # up to here programs find their work themselves
MAX_STEP = 128  # columns of a weight that are multiplied at once
CHUNK = 1024  # pairs that a program making the list holds at once, at most


class MoeConfig(NamedTuple):
    """How the two products are cut up."""

    block_tokens: int
    gate_columns: int  # intermediate columns a program: as many gate rows and as many up rows of w13
    gate_splits: int  # programs along the hidden dimension; more than 1 only where w2 is narrow
    gate_warps: int
    gate_stages: int
    down_rows: int  # rows of w2 at once
    down_repeats: int  # how often, by a program that prepares its activations once; 1 where w2 is not narrow
    down_warps: int
    down_stages: int
    down_prefetch: int = (
        0  # of the repeats, how many ask the L2 for their weights before the gate's product ends
    )


def choose_config(
    tokens: int, top_k: int, experts: int, hidden: int, width: int, *, narrow: bool, plain: bool
) -> MoeConfig:
    """Decode spreads weights over all SMs from the first moment on, prefill reuses them in large tiles.

    `narrow`: two steps cover the columns of w2. `plain`: weights are bfloat16, twice as large as FP8. Up to
    DECODE_TOKENS only `down_repeats`, which changes no sum, may depend on `tokens`.
    """
    if tokens <= DECODE_TOKENS:
        if narrow:
            splits = min(4 if width <= 256 else 2, triton.cdiv(hidden, 512))
            # One token has few programs to fill the device with; more tokens' do better with more rows each.
            return MoeConfig(16, 32, splits, 4, 3, 64, 4 if tokens == 1 else 7, 4, 3, down_prefetch=2)
        return MoeConfig(16, 32, 1, 4, 3, 64, 1, 4, 4)
    each = tokens * top_k / max(1, min(experts, tokens * top_k))  # an expert's pairs if all are chosen alike
    repeats = 4 if narrow else 1
    if each <= 8:
        return MoeConfig(16, 32, 1, 4, 4, 64, repeats, 4, 3)
    if each <= 24:
        return MoeConfig(32, 32, 1, 4, 4, 64, repeats, 4, 3)
    if each <= 96:
        return MoeConfig(64, 64, 1, 8, 3, 64 if plain else 128, repeats, 8, 3)
    return MoeConfig(128, 64, 1, 8, 3, 64 if plain else 128, repeats, 8, 3)


def distinct_sizes(top_k: int, experts: int, most: int) -> list[int]:
    """Numbers of tokens up to `most` that between them launch every variant of these kernels that any does.

    A variant is a choice of constants that is compiled by itself; weights are the same for all.
    """
    sizes: dict[object, int] = {}
    for tokens in range(1, most + 1):
        # Of hidden sizes and kinds of weights, those where most depends on the number of tokens.
        config = choose_config(tokens, top_k, experts, 1, 1, narrow=True, plain=False)
        pairs = tokens * top_k
        listed = not _finds_work(tokens, config.block_tokens)
        sizes.setdefault((config, listed and (_chunk(pairs), pairs > CHUNK)), tokens)
    return list(sizes.values())


def moe_summands(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertWeights,
    shared: SharedExperts | None,
    *,
    config: MoeConfig | None = None,
) -> Tensor:
    """Every token's experts one by one.  # [k + parts, N, hidden] bfloat16

    x [N, hidden] bfloat16 (rows may be apart), weights [N, k] float32, indices [N, k] int64, distinct in a
    row or -1. Summand j < k is weights[:, j] times the expert's output; where indices is -1 it is left as
    allocated. The last `shared.parts` are the shared experts' parts. Nothing is read on the host.
    """
    _check_inputs(x, weights, indices)
    _check_weights(experts, x.shape[1])
    tokens, hidden = x.shape
    top_k = indices.shape[1]
    parts = 0
    if shared is not None:
        _check_weights(_as_experts(shared, experts.block), hidden)
        parts = shared.parts(experts)
    # Half of float32's bytes to write and read again; each is rounded once, as in the models' own code.
    out = torch.empty(top_k + parts, tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    if shared is None or _run_together(experts, shared, parts):
        _run(x, weights, indices, experts, shared, out, config)
    else:
        _run(x, weights, indices, experts, None, out[:top_k], config)
        _run(x, weights[:, :0], indices[:, :0], None, shared, out[top_k:], config, experts.block)
    return out


def _check_inputs(x: Tensor, weights: Tensor, indices: Tensor) -> None:
    assert x.dtype == torch.bfloat16, f"x must be bfloat16, is {x.dtype}"
    assert x.stride(1) == 1, "a token's columns must be adjacent"
    assert indices.shape[:-1] == x.shape[:1], f"indices must be [{x.shape[0]}, k]"
    assert indices.dtype == torch.int64, f"indices must be int64, are {indices.dtype}"
    assert weights.shape == indices.shape, f"weights must be {tuple(indices.shape)}"
    assert weights.dtype == torch.float32, f"weights must be float32, are {weights.dtype}"
    assert indices.is_contiguous(), "indices must be contiguous"
    assert weights.is_contiguous(), "weights must be contiguous"


def _check_weights(experts: ExpertWeights, hidden: int) -> None:
    """w13 [E, 2I, hidden] and w2 [E, hidden, I], contiguous, bfloat16 or FP8 with all of its scales."""
    count, _, width = experts.w2.shape
    block = experts.block
    for name, weight, scale, rows, columns in (
        ("w13", experts.w13, experts.scale13, 2 * width, hidden),
        ("w2", experts.w2, experts.scale2, hidden, width),
    ):
        assert weight.shape == (count, rows, columns), f"{name} must be [{count}, {rows}, {columns}]"
        assert weight.is_contiguous(), f"{name} must be contiguous"
        if scale is None:
            assert weight.dtype == torch.bfloat16, (
                f"{name} without scales must be bfloat16, not {weight.dtype}"
            )
            continue
        blocks = (count, *scale_shape(rows, columns, block))
        assert weight.dtype == FP8, f"{name} with scales must be {FP8}, is {weight.dtype}"
        assert scale.shape == blocks, f"scales of {name} must be {blocks}, are {tuple(scale.shape)}"
        assert scale.dtype == torch.float32, f"scales of {name} must be float32, are {scale.dtype}"
        assert scale.is_contiguous(), f"scales of {name} must be contiguous"
        assert block[1] % 16 == 0, f"FP8 blocks must have a multiple of 16 columns, not {block[1]}"


def _as_experts(shared: SharedExperts, block: Block) -> ExpertWeights:
    """The shared experts as a layer of one expert."""
    scale13 = None if shared.scale13 is None else shared.scale13.unsqueeze(0)
    scale2 = None if shared.scale2 is None else shared.scale2.unsqueeze(0)
    return ExpertWeights(shared.w13.unsqueeze(0), shared.w2.unsqueeze(0), scale13, scale2, block)


def _run_together(experts: ExpertWeights, shared: SharedExperts, parts: int) -> bool:
    """Whether the shared experts are `parts` more experts of the same width and kinds of weights."""
    same_width = experts.w2.shape[-1] * parts == shared.w2.shape[-1]
    same13 = (experts.scale13 is None) == (shared.scale13 is None)
    return same_width and same13 and (experts.scale2 is None) == (shared.scale2 is None)


def _step(columns: int, scale: Tensor | None, block: Block) -> int:
    """Columns multiplied at once: a power of two that stays within one scale's block."""
    step: int = min(MAX_STEP, triton.next_power_of_2(max(16, columns)))
    return step if scale is None else min(step, block[1] & -block[1])


def _run(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertWeights | None,
    shared: SharedExperts | None,
    out: Tensor,
    config: MoeConfig | None,
    block: Block = (1, 1),
) -> None:
    """Both products of the routed experts, of the shared ones, or of both. `block`: where experts is None."""
    tokens, hidden = x.shape
    top_k = indices.shape[1]
    parts = out.shape[0] - top_k
    main = experts or shared
    assert main is not None
    if experts is not None:
        block = experts.block
    count = 0 if experts is None else experts.w13.shape[0]
    width = main.w2.shape[-1] if experts is not None else main.w2.shape[-1] // parts
    narrow = _is_narrow(width, _step(width, main.scale2, block))
    config = config or choose_config(
        tokens, top_k, count, hidden, width, narrow=narrow, plain=main.scale2 is None
    )
    assert narrow or config.gate_splits == config.down_repeats == 1, f"{config} is for a w2 of few columns"
    extra = shared or main
    shared_width = extra.w2.shape[-1]
    blocks, list_experts, list_pairs = _list_work(indices, count, config.block_tokens)
    token_blocks = triton.cdiv(tokens, config.block_tokens)
    work = {
        "indices_ptr": indices,
        "experts_ptr": list_experts,
        "pairs_ptr": list_pairs,
        "tokens": tokens,
        "routed_blocks": blocks,
        "token_blocks": token_blocks,
        "EXPERTS": count,
        "TOP_K": top_k,
        "TOP_BLOCK": triton.next_power_of_2(max(1, top_k)),
        "BLOCK_TOKENS": config.block_tokens,
        "SHARED": shared is not None,
        "HIDDEN": hidden,
        "WIDTH": width,
        "SHARED_WIDTH": shared_width,
        "SCALE_ROWS": block[0],
        "SCALE_COLUMNS": block[1],
        **launch_options(),
    }
    programs = blocks + parts * token_blocks
    middle = _gate_up(x, main, extra, out.shape[0] * tokens, programs, config, work)
    _down(middle, main, extra, weights, out, programs, config, work)


def _gate_up(
    x: Tensor,
    main: ExpertWeights | SharedExperts,
    extra: ExpertWeights | SharedExperts,
    rows: int,
    programs: int,
    config: MoeConfig,
    work: dict[str, Any],
) -> Tensor:
    """Activations [rows, I], or where the hidden dimension is split the sums before them [splits, rows, 2I].

    A row is a token's summand. programs: blocks, those without work included.
    """
    hidden, width, splits = work["HIDDEN"], work["WIDTH"], config.gate_splits
    if splits == 1:
        middle = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    else:
        middle = torch.empty(splits, rows, 2 * width, dtype=torch.float32, device=x.device)
    step = _step(hidden, main.scale13, (work["SCALE_ROWS"], work["SCALE_COLUMNS"]))
    _gate_up_kernel[(programs, triton.cdiv(width, config.gate_columns), splits)](
        x,
        main.w13,
        main.scale13,
        extra.w13,
        extra.scale13,
        middle,
        rows,
        x.stride(0),
        SPLITS=splits,
        STEPS=triton.cdiv(hidden, step * splits),
        BLOCK_COLUMNS=config.gate_columns,
        BLOCK_STEP=step,
        num_warps=config.gate_warps,
        num_stages=config.gate_stages,
        **work,
    )
    return middle


def _down(
    middle: Tensor,
    main: ExpertWeights | SharedExperts,
    extra: ExpertWeights | SharedExperts,
    weights: Tensor,
    out: Tensor,
    programs: int,
    config: MoeConfig,
    work: dict[str, Any],
) -> None:
    """The second product of what `_gate_up` made, into out [k + parts, N, hidden]."""
    hidden, width = work["HIDDEN"], work["WIDTH"]
    step = _step(width, main.scale2, (work["SCALE_ROWS"], work["SCALE_COLUMNS"]))
    grid = (programs, triton.cdiv(hidden, config.down_rows * config.down_repeats))
    tensors = (middle, main.w2, main.scale2, extra.w2, extra.scale2, weights, out)
    sizes = {"BLOCK_ROWS": config.down_rows, "BLOCK_STEP": step}
    launch = {"num_warps": config.down_warps, "num_stages": config.down_stages}
    if not _is_narrow(width, step):
        _down_wide_kernel[grid](*tensors, **sizes, **work, **launch)
        return
    _down_kernel[grid](
        *tensors,
        out.shape[0] * out.shape[1],
        SPLITS=config.gate_splits,
        STEPS=triton.cdiv(width, step),
        REPEATS=config.down_repeats,
        PREFETCH=min(config.down_prefetch, config.down_repeats),
        **sizes,
        **work,
        **launch,
    )


def _is_narrow(width: int, step: int) -> bool:
    """Whether one or two steps cover the columns of w2."""
    return width <= 2 * step


def _finds_work(tokens: int, block_tokens: int) -> bool:
    """Whether programs find their work themselves, without a list."""
    return tokens <= min(UNLISTED_TOKENS, block_tokens)


def _chunk(pairs: int) -> int:
    """Pairs that a program making the list holds at once."""
    return min(CHUNK, int(triton.next_power_of_2(pairs)))


def _list_work(indices: Tensor, experts: int, block_tokens: int) -> tuple[int, Tensor | None, Tensor | None]:
    """How many blocks routed experts have at most; each one's expert, and its pairs, -1 where there is none.

    The lists are None where programs find their work themselves.
    """
    tokens, top_k = indices.shape
    pairs = tokens * top_k
    if _finds_work(tokens, block_tokens):
        return pairs, None, None
    used = min(experts, pairs)
    blocks = min(pairs, (pairs + used * (block_tokens - 1)) // block_tokens)
    if blocks == 0:
        return 0, indices, indices
    numbers = torch.empty(blocks, dtype=torch.int32, device=indices.device)
    listed = torch.empty(blocks * block_tokens, dtype=torch.int32, device=indices.device)
    counts = None
    chunk = _chunk(pairs)
    if pairs > CHUNK:
        counts = torch.empty(experts, dtype=torch.int32, device=indices.device)
        _count_kernel[(experts,)](indices, counts, pairs, CHUNK=chunk, **launch_options())
    _list_kernel[(experts,)](
        indices,
        counts,
        numbers,
        listed,
        pairs,
        blocks,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts),
        CHUNK=chunk,
        BLOCK_TOKENS=block_tokens,
        **launch_options(),
    )
    return blocks, numbers, listed


@triton.jit(do_not_specialize=["pairs"])  # or each prompt's length compiles anew
def _count_kernel(indices_ptr, counts_ptr, pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many pairs one expert has."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        chosen = tl.load(indices_ptr + start + lane, mask=start + lane < pairs, other=-1)
        found += (chosen == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _list_kernel(  # type: ignore[no-untyped-def]
    indices_ptr,
    counts_ptr,
    experts_ptr,
    pairs_ptr,
    pairs,
    blocks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The blocks of one expert, behind those of all lower numbers; pairs keep their order."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    number = tl.arange(0, BINS)
    if counts_ptr is None:
        every = tl.load(indices_ptr + lane, mask=lane < pairs, other=-1).to(tl.int32)
        counts = tl.histogram(tl.maximum(every, 0), BINS, mask=every >= 0)
    else:
        counts = tl.load(counts_ptr + number, mask=number < EXPERTS, other=0)
    sizes = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first = tl.sum(tl.where(number < expert, sizes, 0), 0)
    mine = tl.sum(tl.where(number == expert, counts, 0), 0)
    last = first + (mine + BLOCK_TOKENS - 1) // BLOCK_TOKENS

    place = pairs_ptr + first * BLOCK_TOKENS
    seen = 0
    for start in range(0, pairs, CHUNK):
        chosen = tl.load(indices_ptr + start + lane, mask=start + lane < pairs, other=-1)
        here = (chosen == expert).to(tl.int32)
        tl.store(place + seen + tl.cumsum(here, 0) - 1, start + lane, mask=here > 0)
        seen += tl.sum(here, 0)
    row = tl.arange(0, BLOCK_TOKENS)
    rest = mine + row < (last - first) * BLOCK_TOKENS
    tl.store(place + mine + row, tl.full((BLOCK_TOKENS,), -1, tl.int32), mask=rest)
    for block in range(first, last):
        tl.store(experts_ptr + block, expert)
    # All programs share in marking the blocks that nobody has.
    for block in range(tl.sum(sizes, 0) + expert, blocks, EXPERTS):
        tl.store(experts_ptr + block, -1)


@triton.jit
def _find_work(  # type: ignore[no-untyped-def]
    indices_ptr,
    experts_ptr,
    pairs_ptr,
    tokens,
    routed_blocks,
    token_blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The program's expert, its tokens, the summand of each, and which of them are real.

    Experts from EXPERTS on are shared ones, and -1 is no work. CACHE: how the lists are read, EARLY where
    the router is not the kernel just before.
    """
    block = tl.program_id(0)
    row = tl.arange(0, BLOCK_TOKENS)
    # Shared experts come last and take the tokens as they are.
    part = (block - routed_blocks) // token_blocks
    token = (block - routed_blocks - part * token_blocks) * BLOCK_TOKENS + row
    expert = EXPERTS + part
    summand = tl.zeros((BLOCK_TOKENS,), tl.int32) + (TOP_K + part)
    used = token < tokens
    if TOP_K > 0:  # noqa: SIM102 - known when compiling, and then nothing divides by 0
        if block < routed_blocks:
            if pairs_ptr is None:
                # Block i belongs to pair i, and has work if no token before has chosen the same expert.
                expert = tl.load(indices_ptr + block, cache_modifier=CACHE).to(tl.int32)
                choice = tl.arange(0, TOP_BLOCK)
                pair = row[:, None] * TOP_K + choice[None, :]
                real = (row < tokens)[:, None] & (choice < TOP_K)[None, :]
                chosen = tl.load(indices_ptr + pair, mask=real, other=-1, cache_modifier=CACHE)
                same = chosen.to(tl.int32) == expert
                used = tl.max(same.to(tl.int32), 1) > 0
                summand = tl.max(tl.where(same, choice[None, :], 0), 1)
                token = row
                first = tl.min(tl.where(used, row, BLOCK_TOKENS), 0)
                expert = tl.where(first < block // TOP_K, -1, expert)
            else:
                expert = tl.load(experts_ptr + block, cache_modifier=CACHE)
                there = (expert + row * 0) >= 0
                pair = tl.load(
                    pairs_ptr + block * BLOCK_TOKENS + row, mask=there, other=-1, cache_modifier=CACHE
                )
                used = pair >= 0
                token = pair // TOP_K
                summand = pair - token * TOP_K
    return expert, token, summand, used


@triton.jit(do_not_specialize=["rows", "tokens", "routed_blocks", "token_blocks"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scale_ptr,
    shared_w_ptr,
    shared_scale_ptr,
    middle_ptr,
    rows,
    x_stride,
    indices_ptr,
    experts_ptr,
    pairs_ptr,
    tokens,
    routed_blocks,
    token_blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate and up columns of one block: silu(gate) * up of one split, or sums [splits, rows, 2I] of several.

    Weights are the left operand: wgmma takes them from registers, where FP8 has to be widened anyway.
    """
    wait_for_inputs(PDL)
    expert, token, summand, used = _find_work(
        indices_ptr, experts_ptr, pairs_ptr, tokens, routed_blocks, token_blocks,
        EXPERTS, TOP_K, TOP_BLOCK, BLOCK_TOKENS, "",
    )  # fmt: skip
    if expert < 0:
        return
    lane = tl.arange(0, 2 * BLOCK_COLUMNS)
    half = lane // BLOCK_COLUMNS
    column = tl.program_id(1) * BLOCK_COLUMNS + lane % BLOCK_COLUMNS
    inside = tl.minimum(column, WIDTH - 1)  # beyond the last: computed and not stored
    w_rows = half * WIDTH + inside
    w_base = w_ptr
    scale_base = scale_ptr
    SCALE_WIDTH: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    if SHARED and expert >= EXPERTS:
        w_base = shared_w_ptr
        scale_base = shared_scale_ptr
        w_rows = half * SHARED_WIDTH + (expert - EXPERTS) * WIDTH + inside
    else:
        SCALES: tl.constexpr = (2 * WIDTH + SCALE_ROWS - 1) // SCALE_ROWS * SCALE_WIDTH
        w_base += expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        if scale_ptr is not None:
            scale_base += expert * SCALES
    start = tl.program_id(2) * (STEPS * BLOCK_STEP)
    k = start + tl.arange(0, BLOCK_STEP)
    w_ptrs = w_base + w_rows.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    EVEN: tl.constexpr = HIDDEN == SPLITS * STEPS * BLOCK_STEP
    sums = tl.zeros((2 * BLOCK_COLUMNS, BLOCK_TOKENS), tl.float32)
    if scale_ptr is not None:
        # One step ahead, because a load that is used at once would stall every step.
        scale_ptrs = scale_base + w_rows // SCALE_ROWS * SCALE_WIDTH
        scale = tl.load(scale_ptrs + tl.minimum(start // SCALE_COLUMNS, SCALE_WIDTH - 1))
    for step in range(STEPS):
        if EVEN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=used[:, None], other=0.0)
        else:
            real = k + step * BLOCK_STEP < HIDDEN
            w = tl.load(w_ptrs, mask=real[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=used[:, None] & real[None, :], other=0.0)
        if scale_ptr is None:
            sums = tl.dot(w, tl.trans(x), sums)
        else:
            following = (start + (step + 1) * BLOCK_STEP) // SCALE_COLUMNS
            next_scale = tl.load(scale_ptrs + tl.minimum(following, SCALE_WIDTH - 1))
            sums += tl.dot(widen(w), tl.trans(x)) * scale[:, None]
            scale = next_scale
        w_ptrs += BLOCK_STEP
        x_ptrs += BLOCK_STEP
    place = (summand * tokens + token).to(tl.int64)
    if SPLITS == 1:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_COLUMNS, BLOCK_TOKENS)), (1, 2, 0)))
        column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        active = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)
        stored = used[:, None] & (column < WIDTH)[None, :]
        tl.store(middle_ptr + place[:, None] * WIDTH + column[None, :], tl.trans(active), mask=stored)
    else:
        place += tl.program_id(2).to(tl.int64) * rows
        middle_ptrs = middle_ptr + place[None, :] * (2 * WIDTH) + (half * WIDTH + column)[:, None]
        tl.store(middle_ptrs, sums, mask=used[None, :] & (column < WIDTH)[:, None])


@triton.jit
def _activation(  # type: ignore[no-untyped-def]
    middle_ptr, place, used, k, rows, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Columns k of the activations of a block's pairs.  # [pairs, k] bfloat16, 0 where there is no pair"""
    mask = used[:, None] & (k < WIDTH)[None, :]
    if SPLITS == 1:
        active = tl.load(middle_ptr + place[:, None] * WIDTH + k[None, :], mask=mask, other=0.0)
    else:
        ptrs = middle_ptr + place[:, None] * (2 * WIDTH) + k[None, :]
        gate = tl.load(ptrs, mask=mask, other=0.0)
        up = tl.load(ptrs + WIDTH, mask=mask, other=0.0)
        for _ in tl.static_range(SPLITS - 1):
            ptrs += rows.to(tl.int64) * (2 * WIDTH)
            gate += tl.load(ptrs, mask=mask, other=0.0)
            up += tl.load(ptrs + WIDTH, mask=mask, other=0.0)
        active = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)
    return active


@triton.jit
def _down_weights(  # type: ignore[no-untyped-def]
    expert,
    w_ptr,
    scale_ptr,
    shared_w_ptr,
    shared_scale_ptr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """Where the expert's w2 and scales are: bases, strides of rows, and the first column.

    A shared part is some columns of a wider matrix.
    """
    SCALE_WIDTH: tl.constexpr = (WIDTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    SCALE_HEIGHT: tl.constexpr = (HIDDEN + SCALE_ROWS - 1) // SCALE_ROWS
    w_base = w_ptr
    scale_base = w_ptr if scale_ptr is None else scale_ptr  # a tuple cannot hold None
    stride = expert * 0 + WIDTH
    scale_stride = expert * 0 + SCALE_WIDTH
    first = expert * 0
    if SHARED and expert >= EXPERTS:
        w_base = shared_w_ptr
        scale_base = shared_w_ptr if scale_ptr is None else shared_scale_ptr
        stride = expert * 0 + SHARED_WIDTH
        scale_stride = expert * 0 + (SHARED_WIDTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        first = (expert - EXPERTS) * WIDTH
    else:
        w_base += expert.to(tl.int64) * (HIDDEN * WIDTH)
        if scale_ptr is not None:
            scale_base += expert * (SCALE_WIDTH * SCALE_HEIGHT)
    return w_base, scale_base, stride, scale_stride, first


@triton.jit(do_not_specialize=["rows", "tokens", "routed_blocks", "token_blocks"])
def _down_kernel(  # type: ignore[no-untyped-def]
    middle_ptr,
    w_ptr,
    scale_ptr,
    shared_w_ptr,
    shared_scale_ptr,
    weights_ptr,
    out_ptr,
    rows,
    indices_ptr,
    experts_ptr,
    pairs_ptr,
    tokens,
    routed_blocks,
    token_blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """w2 of few columns: activations are prepared once, in one or two STEPS, then rows of w2 stream by."""
    # The router has ended before the gate's product began.
    expert, token, summand, used = _find_work(
        indices_ptr, experts_ptr, pairs_ptr, tokens, routed_blocks, token_blocks,
        EXPERTS, TOP_K, TOP_BLOCK, BLOCK_TOKENS, EARLY,
    )  # fmt: skip
    if expert < 0:
        wait_for_inputs(PDL)
        return
    w_base, scale_base, stride, scale_stride, first = _down_weights(
        expert, w_ptr, scale_ptr, shared_w_ptr, shared_scale_ptr,
        EXPERTS, SHARED, HIDDEN, WIDTH, SHARED_WIDTH, SCALE_ROWS, SCALE_COLUMNS,
    )  # fmt: skip
    if PDL and PREFETCH > 0:
        within = tl.minimum(sectors(STEPS * BLOCK_STEP, w_ptr.dtype.element_ty.primitive_bitwidth), WIDTH - 1)
        for repeat in range(PREFETCH):
            wanted = (tl.program_id(1) * REPEATS + repeat) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            wanted = tl.minimum(wanted, HIDDEN - 1)
            prefetch(w_base + first + wanted[:, None] * stride + within[None, :])
    wait_for_inputs(PDL)
    place = (summand * tokens + token).to(tl.int64)
    k = tl.arange(0, BLOCK_STEP)
    active = tl.trans(_activation(middle_ptr, place, used, k, rows, WIDTH, SPLITS))
    if STEPS == 2:
        active2 = tl.trans(_activation(middle_ptr, place, used, k + BLOCK_STEP, rows, WIDTH, SPLITS))
    factor = tl.load(weights_ptr + token * TOP_K + summand, mask=used & (summand < TOP_K), other=1.0)
    w_base += first
    scale_base2 = scale_base
    if scale_ptr is not None:
        scale_base2 = scale_base + (first + BLOCK_STEP) // SCALE_COLUMNS
        scale_base += first // SCALE_COLUMNS
    for repeat in range(REPEATS):
        row = (tl.program_id(1) * REPEATS + repeat) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = tl.minimum(row, HIDDEN - 1)  # beyond the last: computed and not stored
        w_ptrs = w_base + inside[:, None] * stride + k[None, :]
        if BLOCK_STEP <= WIDTH:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(k < WIDTH)[None, :], other=0.0)
        if scale_ptr is None:
            sums = tl.dot(w, active)
        else:
            scale = tl.load(scale_base + inside // SCALE_ROWS * scale_stride)
            sums = tl.dot(widen(w), active) * scale[:, None]
        if STEPS == 2:
            if 2 * BLOCK_STEP == WIDTH:
                w2 = tl.load(w_ptrs + BLOCK_STEP)
            else:
                w2 = tl.load(w_ptrs + BLOCK_STEP, mask=(k + BLOCK_STEP < WIDTH)[None, :], other=0.0)
            if scale_ptr is None:
                sums = tl.dot(w2, active2, sums)
            else:
                scale2 = tl.load(scale_base2 + inside // SCALE_ROWS * scale_stride)
                sums += tl.dot(widen(w2), active2) * scale2[:, None]
        out_ptrs = out_ptr + place[None, :] * HIDDEN + row[:, None]
        sums = (sums * factor[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, sums, mask=used[None, :] & (row < HIDDEN)[:, None])


@triton.jit(do_not_specialize=["tokens", "routed_blocks", "token_blocks"])
def _down_wide_kernel(  # type: ignore[no-untyped-def]
    middle_ptr,
    w_ptr,
    scale_ptr,
    shared_w_ptr,
    shared_scale_ptr,
    weights_ptr,
    out_ptr,
    indices_ptr,
    experts_ptr,
    pairs_ptr,
    tokens,
    routed_blocks,
    token_blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """w2 of many columns, walked along with the activations."""
    # The router has ended before the gate's product began.
    expert, token, summand, used = _find_work(
        indices_ptr, experts_ptr, pairs_ptr, tokens, routed_blocks, token_blocks,
        EXPERTS, TOP_K, TOP_BLOCK, BLOCK_TOKENS, EARLY,
    )  # fmt: skip
    if expert < 0:
        wait_for_inputs(PDL)
        return
    w_base, scale_base, stride, scale_stride, first = _down_weights(
        expert, w_ptr, scale_ptr, shared_w_ptr, shared_scale_ptr,
        EXPERTS, SHARED, HIDDEN, WIDTH, SHARED_WIDTH, SCALE_ROWS, SCALE_COLUMNS,
    )  # fmt: skip
    wait_for_inputs(PDL)
    place = (summand * tokens + token).to(tl.int64)
    factor = tl.load(weights_ptr + token * TOP_K + summand, mask=used & (summand < TOP_K), other=1.0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = tl.minimum(row, HIDDEN - 1)  # beyond the last: computed and not stored
    k = tl.arange(0, BLOCK_STEP)
    w_ptrs = w_base + first + inside[:, None] * stride + k[None, :]
    middle_ptrs = middle_ptr + place[:, None] * WIDTH + k[None, :]
    sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    if scale_ptr is not None:
        scale_ptrs = scale_base + inside // SCALE_ROWS * scale_stride
        scale = tl.load(scale_ptrs + first // SCALE_COLUMNS)
    for start in range(0, WIDTH, BLOCK_STEP):
        if WIDTH % BLOCK_STEP == 0:
            w = tl.load(w_ptrs)
            active = tl.load(middle_ptrs, mask=used[:, None], other=0.0)
        else:
            real = k + start < WIDTH
            w = tl.load(w_ptrs, mask=real[None, :], other=0.0)
            active = tl.load(middle_ptrs, mask=used[:, None] & real[None, :], other=0.0)
        if scale_ptr is None:
            sums = tl.dot(w, tl.trans(active), sums)
        else:
            following = tl.minimum(start + BLOCK_STEP, WIDTH - 1) + first
            next_scale = tl.load(scale_ptrs + following // SCALE_COLUMNS)
            sums += tl.dot(widen(w), tl.trans(active)) * scale[:, None]
            scale = next_scale
        w_ptrs += BLOCK_STEP
        middle_ptrs += BLOCK_STEP
    out_ptrs = out_ptr + place[None, :] * HIDDEN + row[:, None]
    sums = (sums * factor[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, sums, mask=used[None, :] & (row < HIDDEN)[:, None])
