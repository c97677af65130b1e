"""Norms and what is fused with them, one launch each; the twins in kernels/ref/norm.py define them.

A decode runs these some 120 times a step on a few rows, so what counts is latency: one program holds a whole
row in registers, all of its loads are issued before the first is needed, and constants are fetched while
the kernel before still runs. A row's result does not depend on how many rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import launch_options, wait_for_inputs

SUMMAND_DTYPES = (torch.float32, torch.bfloat16)


class NormConfig(NamedTuple):
    """Warps that share a row."""

    warps: int


class SiluConfig(NamedTuple):
    """Columns of the result that one program makes, and its warps."""

    block: int
    warps: int


def norm_config(size: int) -> NormConfig:
    """512 elements a warp up to 16 warps: at hidden 7168 a thread has room for six float32 summands.

    It must not depend on the number of rows: with the warps, the order of the sum of squares changes.
    """
    return NormConfig(min(16, max(1, triton.next_power_of_2(size) // 512)))


def silu_config(rows: int, half: int) -> SiluConfig:
    """Short blocks spread few rows over the multiprocessors; many rows fill them anyway."""
    block = 128 if rows <= 16 else 512
    return SiluConfig(min(block, triton.next_power_of_2(half)), 4)


def add_norm(
    residual: Tensor | None,
    summands: Tensor,
    weight: Tensor,
    eps: float,
    valid: Tensor | None = None,
    *,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Add summands [S, N, hidden] to residual [N, hidden] (None: zeros) and normalise the rounded sum.

    summands float32 or bfloat16, residual and weight [hidden] bfloat16. Both results, the new residual and
    its norm, are [N, hidden] bfloat16, each rounded once from float32. Where not `valid` [N] bool the
    summands count as 0, whatever they hold.
    """
    parts, rows, size = check_summands(summands)
    _check_weight(weight, size)
    assert residual is None or residual.shape == (rows, size), f"residual must be [{rows}, {size}]"
    assert residual is None or residual.dtype == weight.dtype, f"residual is {residual.dtype}, not bfloat16"
    assert residual is None or residual.stride(1) == 1, "the residual's columns must be adjacent"
    check_valid(valid, rows)
    total, normed = (torch.empty(rows, size, dtype=weight.dtype, device=weight.device) for _ in range(2))
    if rows:
        _add_norm_kernel[(rows,)](
            residual,
            summands,
            weight,
            valid,
            total,
            normed,
            0 if residual is None else residual.stride(0),
            summands.stride(0),
            summands.stride(1),
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            S=parts,
            num_warps=(config or norm_config(size)).warps,
            **launch_options(),
        )
    return total, normed


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, config: NormConfig | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., size], all bfloat16.

    Computed in float32 and rounded once. The result is contiguous.
    """
    size = weight.shape[0]
    rows = _check_rows("x", x.reshape(-1, x.shape[-1]), weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=(config or norm_config(size)).warps,
            **launch_options(),
        )
    return out


def join_norms(
    embedding: Tensor,
    hidden: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    eps: float,
    *,
    config: NormConfig | None = None,
) -> Tensor:
    """The norms of embedding and hidden [N, size], side by side, all bfloat16.  # [N, 2 * size]"""
    count, size = embedding.shape
    _check_rows("embedding", embedding, enorm)
    _check_rows("hidden", hidden, hnorm)
    assert hidden.shape == (count, size), f"hidden must be [{count}, {size}], is {tuple(hidden.shape)}"
    out = torch.empty(count, 2 * size, dtype=embedding.dtype, device=embedding.device)
    if count:
        _join_norms_kernel[(count, 2)](
            embedding,
            hidden,
            enorm,
            hnorm,
            out,
            embedding.stride(0),
            hidden.stride(0),
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=(config or norm_config(size)).warps,
            **launch_options(),
        )
    return out


def silu_and_mul_summands(summands: Tensor, *, config: SiluConfig | None = None) -> Tensor:
    """silu of the first half of the summed [S, N, 2I] times the second half.  # [N, I] bfloat16

    summands float32 or bfloat16; computed in float32 and rounded once.
    """
    parts, rows, width = check_summands(summands)
    assert width % 2 == 0, f"gate and up must be of one width, there are {width} columns"
    half = width // 2
    out = torch.empty(rows, half, dtype=torch.bfloat16, device=summands.device)
    if out.numel():
        config = config or silu_config(rows, half)
        _silu_and_mul_kernel[(rows, triton.cdiv(half, config.block))](
            summands,
            out,
            summands.stride(0),
            summands.stride(1),
            HALF=half,
            BLOCK=config.block,
            S=parts,
            num_warps=config.warps,
            **launch_options(),
        )
    return out


def check_summands(summands: Tensor) -> tuple[int, int, int]:
    """S, N and columns of summands, which must be float32 or bfloat16 with adjacent columns."""
    parts, rows, width = summands.shape
    assert parts > 0, "there must be a summand"
    assert summands.dtype in SUMMAND_DTYPES, f"summands must be float32 or bfloat16, are {summands.dtype}"
    assert summands.stride(2) == 1, "a summand's columns must be adjacent"
    return parts, rows, width


def check_valid(valid: Tensor | None, rows: int) -> None:
    """One flag a row, or None."""
    assert valid is None or valid.shape == (rows,), f"valid must be [{rows}]"
    assert valid is None or valid.is_contiguous(), "valid must be contiguous"


def _check_weight(weight: Tensor, size: int) -> None:
    assert weight.shape == (size,), f"the norm's weight must be [{size}], is {tuple(weight.shape)}"
    assert weight.dtype == torch.bfloat16, f"the norm's weight must be bfloat16, is {weight.dtype}"
    assert weight.is_contiguous(), "the norm's weight must be contiguous"


def _check_rows(name: str, rows: Tensor, weight: Tensor) -> Tensor:
    """Rows that the weight fits, returned."""
    _check_weight(weight, rows.shape[1])
    assert rows.dtype == weight.dtype, f"{name} must be bfloat16, is {rows.dtype}"
    assert rows.stride(1) == 1, f"the columns of {name} must be adjacent"
    return rows


@triton.jit
def add_summands(pointers, keep, summand_stride, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum in order 0, 1, ... of S summands in float32. No load waits for another."""
    total = tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, S):
        pointers += summand_stride
        total += tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
    return total


@triton.jit
def normalise(x, weight, eps, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row x of SIZE elements (zeros behind them) in float32, divided by its rms and scaled."""
    return x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * weight.to(tl.float32)


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    residual_ptr,
    summands_ptr,
    weight_ptr,
    valid_ptr,
    total_ptr,
    normed_ptr,
    residual_stride,
    summand_stride,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    keep = column < SIZE
    weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
    wait_for_inputs(PDL)
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + row) != 0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=keep, other=0.0)
    total = add_summands(summands_ptr + row * row_stride + column, keep, summand_stride, S)
    if valid_ptr is not None:
        total = tl.where(valid, total, 0.0)  # after the loads, so that they need not wait for the flag
    if residual_ptr is not None:
        total = residual.to(tl.float32) + total
    rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * SIZE + column, rounded, mask=keep)
    normed = normalise(rounded.to(tl.float32), weight, eps, SIZE)
    tl.store(normed_ptr + row * SIZE + column, normed.to(normed_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _norm_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    keep = column < SIZE
    weight = tl.load(weight_ptr + column, mask=keep, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + column, mask=keep, other=0.0).to(tl.float32)
    normed = normalise(x, weight, eps, SIZE)
    tl.store(out_ptr + column, normed.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _norm_row(x_ptr + row * row_stride, weight_ptr, out_ptr + row * SIZE, eps, SIZE, BLOCK, PDL)


@triton.jit
def _join_norms_kernel(  # type: ignore[no-untyped-def]
    embedding_ptr,
    hidden_ptr,
    enorm_ptr,
    hnorm_ptr,
    out_ptr,
    embedding_stride,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * 2 * SIZE
    if tl.program_id(1) == 0:
        _norm_row(embedding_ptr + row * embedding_stride, enorm_ptr, out_ptr, eps, SIZE, BLOCK, PDL)
    else:
        _norm_row(hidden_ptr + row * hidden_stride, hnorm_ptr, out_ptr + SIZE, eps, SIZE, BLOCK, PDL)


@triton.jit
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    summands_ptr,
    out_ptr,
    summand_stride,
    row_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < HALF
    wait_for_inputs(PDL)
    gate_ptr = summands_ptr + row * row_stride + column
    gate = add_summands(gate_ptr, keep, summand_stride, S)
    up = add_summands(gate_ptr + HALF, keep, summand_stride, S)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * HALF + column, product.to(out_ptr.dtype.element_ty), mask=keep)
