"""Linear layers over bf16 or block-scaled FP8 weights, built to stream the weights at memory speed.

Up to 64 rows the weight is the left operand, so few tokens fill the narrow side of the tensor cores' tile,
and K is split over programs; the order of additions then depends on the weight alone, so a token gets the
same bits in any such batch. An FP8 weight becomes bf16 (exactly) in registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.fp8 import widen
from nextn.kernels.launch import (
    DECODE_TOKENS,
    LEAST_DOT,
    dot_block,
    launch_options,
    prefetch,
    sectors,
    wait_for_inputs,
)
from nextn.kernels.ref.gemm import FP8, Block, scale_shape

PROCESSORS = 132  # of an H200; a constant, so that the order of additions is no matter of the device
MAX_SPLITS = 16
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """How one product is cut up.

    splits and block_k set the order of additions, the others only the speed. `prefetch`: K steps of its own
    weights that a program asks the L2 for before it waits for the kernel that writes x (dependent launch
    only). weights_first: dot(weight, x^T), else dot(x, weight^T), which takes tiles of up to 32 tokens well.
    group: token tiles that share weights in the L2.
    """

    tokens: int
    block_r: int
    splits: int
    warps: int
    stages: int
    block_k: int = 128
    prefetch: int = 0
    weights_first: bool = True
    group: int = 8


def choose_config(tokens: int, rows: int, columns: int, *, fp8: bool) -> Config:
    """The configuration for x [tokens, columns] and a weight [rows, columns], by shape alone."""
    if tokens > DECODE_TOKENS:
        if triton.cdiv(rows, 128) * triton.cdiv(tokens, 128) < PROCESSORS:
            return Config(64, 64, 1, warps=4, stages=4)
        if fp8:  # two programs a processor: one converts weights while the other multiplies
            return Config(128, 64, 1, warps=4, stages=4, block_k=64)
        return Config(128, 128, 1, warps=8, stages=3)
    tile = dot_block(tokens)
    splits = _choose_splits(triton.cdiv(rows, 64), triton.cdiv(columns, 128))
    # Two steps' weights are on their way from memory while the kernel before, often a small one, still runs.
    return Config(tile, 64, splits, warps=4, stages=3 if fp8 else 4, prefetch=2)


def _choose_splits(row_blocks: int, steps: int) -> int:
    """Splits of K that leave the busiest processor the fewest K steps, where a summand costs 1 % of the time.

    Each has at least 3 steps, for less cannot be pipelined, and where possible the programs outnumber the
    processors by a quarter: one program alone cannot keep a processor's loads and conversions busy.
    """

    def badness(splits: int) -> tuple[bool, int, int]:
        programs = row_blocks * splits
        busiest = triton.cdiv(programs, PROCESSORS) * triton.cdiv(steps, splits)
        return 4 * programs < 5 * PROCESSORS, busiest * (100 + splits), splits

    return min(range(1, max(1, min(MAX_SPLITS, steps // 3)) + 1), key=badness)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    block: Block = (128, 128),
    *,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """x [N, K] bf16 times weight [R, K] transposed, as `out_dtype`: bf16 (the default) or float32.  # [N, R]

    weight: bf16 without a scale, or FP8 with scale [row blocks, column blocks] float32. x's rows may lie
    further apart than they are long. Equals the sum of linear_summands, rounded once. AssertionError for
    other shapes, strides and dtypes.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    assert dtype in (torch.bfloat16, torch.float32), f"a result is bf16 or float32, not {dtype}"
    parts = _products(x, weight, scale, block, dtype, config)
    return parts[0] if parts.shape[0] == 1 else _sum_summands(parts, dtype)


def linear_summands(
    x: Tensor, weight: Tensor, scale: Tensor | None, block: Block, *, config: Config | None = None
) -> Tensor:
    """`linear` before the sum over the splits of K: float32, to be added in order.  # [S, N, R]"""
    return _products(x, weight, scale, block, torch.float32, config)


def _products(
    x: Tensor, weight: Tensor, scale: Tensor | None, block: Block, dtype: torch.dtype, config: Config | None
) -> Tensor:
    """[S, N, R]: of `dtype` where S is 1, float32 where there is something left to add."""
    _check(x, weight, scale, block)
    (tokens, columns), rows = x.shape, weight.shape[0]
    config = config or choose_config(tokens, rows, columns, fp8=scale is not None)
    step, tile = _k_step(config.block_k, None if scale is None else block[1])
    steps = triton.cdiv(columns, step)
    per_split = triton.cdiv(steps, max(1, min(config.splits, steps)))
    splits = triton.cdiv(steps, per_split)
    out = x.new_empty(splits, tokens, rows, dtype=dtype if splits == 1 else torch.float32)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(rows, config.block_r) * triton.cdiv(tokens, config.tokens), splits)
    _linear_kernel[grid](
        out,
        x,
        weight,
        scale,
        tokens,
        rows,
        columns,
        x.stride(0),
        weight.stride(0),
        0 if scale is None else scale.stride(0),
        steps,
        per_split,
        SCALE_ROWS=block[0],
        SCALE_COLUMNS=block[1],
        TOKENS=config.tokens,
        BLOCK_R=config.block_r,
        STEP=step,
        BLOCK_K=tile,
        EVEN_K=step == tile and columns % step == 0,
        WEIGHTS_FIRST=config.weights_first,
        GROUP=config.group,
        PREFETCH=config.prefetch,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(),
    )
    return out


def _sum_summands(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """parts [S, N, R] float32 added in order and rounded once.  # [N, R]"""
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    if out.numel() == 0:
        return out
    _sum_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](
        out, parts, out.numel(), SPLITS=parts.shape[0], BLOCK=SUM_BLOCK, num_warps=4, **launch_options()
    )
    return out


def _k_step(block_k: int, scale_columns: int | None) -> tuple[int, int]:
    """(columns of one K step, the tile that holds them): no step crosses a boundary of scales."""
    if scale_columns is None:
        return block_k, block_k
    step = math.gcd(block_k, scale_columns)
    if step < LEAST_DOT:
        step = scale_columns
    return step, dot_block(step)


def _check(x: Tensor, weight: Tensor, scale: Tensor | None, block: Block) -> None:
    assert x.dim() == weight.dim() == 2, f"x and weight are matrices, not {x.dim()}- and {weight.dim()}-D"
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} columns, the weight {weight.shape[1]}"
    assert x.shape[1] > 0, "a product over no columns"
    assert x.dtype == torch.bfloat16, f"x must be bf16, is {x.dtype}"
    assert x.stride(1) == weight.stride(1) == 1, "the columns of x and weight must be adjacent"
    if scale is None:
        assert weight.dtype == torch.bfloat16, f"a weight without scales must be bf16, is {weight.dtype}"
        return
    assert weight.dtype == FP8, f"a weight with scales must be {FP8}, is {weight.dtype}"
    assert scale.dtype == torch.float32, f"scales must be float32, are {scale.dtype}"
    expected = scale_shape(weight.shape[0], weight.shape[1], block)
    assert scale.shape == expected, f"scales must be {list(expected)}, are {list(scale.shape)}"
    assert scale.stride(1) == 1, "the columns of scale must be adjacent"


@triton.jit(do_not_specialize=["tokens", "steps", "per_split"])  # or each batch size compiles anew
def _linear_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    tokens,
    rows,
    columns,
    x_stride,
    weight_stride,
    scale_stride,
    steps,
    per_split,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that run at a time take few token tiles, so that these and the weights they share stay in L2.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_R)
    first_tile = program // (GROUP * row_tiles) * GROUP
    tiles = min(tl.cdiv(tokens, TOKENS) - first_tile, GROUP)
    in_group = program % (GROUP * row_tiles)
    first_row = in_group // tiles * BLOCK_R
    split = tl.program_id(1)
    first, last = split * per_split, min((split + 1) * per_split, steps)

    row = first_row + tl.arange(0, BLOCK_R)
    weights = weight_ptr + row.to(tl.int64) * weight_stride
    if PDL and PREFETCH > 0:
        # Weights are no kernel's output. What lies beyond the last row or column asks for the last again.
        wanted = weight_ptr + tl.minimum(row, rows - 1).to(tl.int64) * weight_stride
        within = sectors(BLOCK_K, weight_ptr.dtype.element_ty.primitive_bitwidth)
        for step in range(first, min(first + PREFETCH, last)):
            prefetch(wanted[:, None] + tl.minimum(step * STEP + within, columns - 1)[None, :])
    wait_for_inputs(PDL)

    token = ((first_tile + in_group % tiles) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inputs = x_ptr + token * x_stride
    if WEIGHTS_FIRST:
        total = tl.zeros((BLOCK_R, TOKENS), tl.float32)
    else:
        total = tl.zeros((TOKENS, BLOCK_R), tl.float32)
    for step in range(first, last):
        column = step * STEP + tl.arange(0, BLOCK_K)
        weight_mask, x_mask = (row < rows)[:, None], (token < tokens)[:, None]
        if not EVEN_K:
            inside = (column < min(columns, (step + 1) * STEP))[None, :]
            weight_mask, x_mask = weight_mask & inside, x_mask & inside
        weight = tl.load(weights[:, None] + column[None, :], mask=weight_mask, other=0.0)
        x = tl.load(inputs[:, None] + column[None, :], mask=x_mask, other=0.0)
        if scale_ptr is None:
            if WEIGHTS_FIRST:
                total = tl.dot(weight, tl.trans(x), total)
            else:
                total = tl.dot(x, tl.trans(weight), total)
        else:
            exact = widen(weight)
            scales = scale_ptr + step * STEP // SCALE_COLUMNS
            if SCALE_ROWS % BLOCK_R == 0:
                scale = tl.load(scales + (first_row // SCALE_ROWS) * scale_stride)
            else:
                scale = tl.load(scales + row // SCALE_ROWS * scale_stride, mask=row < rows, other=0.0)
                scale = tl.expand_dims(scale, 1 if WEIGHTS_FIRST else 0)
            if WEIGHTS_FIRST:
                total += tl.dot(exact, tl.trans(x)) * scale
            else:
                total += tl.dot(x, tl.trans(exact)) * scale
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    results = out_ptr + (split.to(tl.int64) * tokens + token)[:, None] * rows + row[None, :]
    keep = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(results, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    out_ptr, parts_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = element < size
    parts = parts_ptr + element
    total = tl.load(parts, mask=keep, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        parts += size
        total += tl.load(parts, mask=keep, other=0.0)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=keep)
