"""Fast block FP8 on the host: the twins' bits for every code, scale dtype, shape and block size."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels.ref.gemm import FP8, Block, dequantize, scale_shape
from nextn.models.fp8 import FP8_MAX, dequantize_blocks, quantize_blocks
from tests.compare import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
ALL_CODES = torch.arange(256, dtype=torch.uint8)
sizes = st.integers(1, 70)
blocks = st.tuples(st.sampled_from([1, 3, 16, 128]), st.sampled_from([1, 5, 16, 128]))


def random_codes(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator).view(FP8)


def random_scale(weight: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    return torch.exp(4 * torch.randn(scale_shape(*weight.shape, block))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_every_code_is_dequantised_to_the_twins_bits(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """All 256 codes, -0, subnormals and both NaNs among them, under every scale dtype."""
    clean = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
    for codes in (ALL_CODES, clean):
        weight = codes.repeat(6, 1).view(FP8)
        scale = random_scale(weight, (4, 100), scale_dtype)
        actual = dequantize_blocks(weight, scale, (4, 100), dtype)
        assert_close(actual, dequantize(weight, scale, (4, 100), dtype), "bitwise")


@pytest.mark.parametrize(
    "value", [0.0, -0.0, -1.5, 2.0**-149, 2.0**119, 2.0**127, 3e38, float("inf"), float("nan")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extreme_scales_give_the_twins_bits(value: float, dtype: torch.dtype) -> None:
    """Scales at and beyond what the fast way can shift: subnormal, huge, negative, not finite."""
    weight = ALL_CODES.repeat(2, 1).view(FP8)[:, :0x7F].contiguous()
    scale = torch.tensor([[1.0], [value]])
    actual = dequantize_blocks(weight, scale, (1, 128), dtype)
    assert_close(actual, dequantize(weight, scale, (1, 128), dtype), "bitwise")


@given(sizes, sizes, blocks, st.sampled_from(DTYPES), st.sampled_from(SCALE_DTYPES), st.booleans())
@settings(max_examples=150)
def test_dequantising_any_shape_is_the_twin(
    rows: int, columns: int, block: Block, dtype: torch.dtype, scale_dtype: torch.dtype, clean: bool
) -> None:
    """Short blocks at the edges, blocks taller than the weight, parts of a wider tensor."""
    codes = random_codes(rows, columns + 3, rows * columns).view(torch.uint8)
    if clean:
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
    weight = codes.view(FP8)[:, :columns]
    scale = random_scale(weight, block, scale_dtype)
    actual = dequantize_blocks(weight, scale, block, dtype)
    assert_close(actual, dequantize(weight, scale, block, dtype), "bitwise")


def test_tall_blocks_are_worked_through_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of more rows than a step takes has one scale, also where one of its steps holds a NaN."""
    monkeypatch.setattr("nextn.models.fp8._STEP_ITEMS", 100)
    monkeypatch.setattr("nextn.models.fp8._SERIAL_ITEMS", 100)
    weight = random_codes(60, 33)
    weight.view(torch.uint8)[:30] &= 0xFE
    scale = random_scale(weight, (50, 16), torch.float32)
    actual = dequantize_blocks(weight, scale, (50, 16), torch.bfloat16)
    assert_close(actual, dequantize(weight, scale, (50, 16), torch.bfloat16), "bitwise")


def plain_quantize(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The format's rule, block by block."""
    scale = torch.empty(scale_shape(*weight.shape, block))
    codes = torch.empty(weight.shape, dtype=FP8)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            amax = weight[part].float().abs().max()
            scale[row, column] = amax / FP8_MAX if amax > 0 else 1.0
            codes[part] = (weight[part].float() / scale[row, column]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, scale


@given(sizes, sizes, blocks, st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=60)
def test_quantising_any_shape_follows_the_rule_of_the_format(
    rows: int, columns: int, block: Block, dtype: torch.dtype, zeros: bool
) -> None:
    """Every block's scale is amax / 448, or 1 for zeros, and its codes the rounded quotients, bit for bit."""
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, columns)
    if zeros:
        weight[: rows // 2 + 1] = 0
    weight = weight.to(dtype)
    codes, scale = quantize_blocks(weight, block)
    expected = plain_quantize(weight, block)
    assert codes.is_contiguous()
    assert_close(codes, expected[0], "bitwise", what="codes")
    assert_close(scale, expected[1], "bitwise", what="scales")


@given(sizes, sizes, blocks)
@settings(max_examples=60)
def test_values_survive_quantising_within_half_a_step(rows: int, columns: int, block: Block) -> None:
    """e4m3 has 3 mantissa bits: the error is at most 1/16 of the value, or half the block's smallest step."""
    weight = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    codes, scale = quantize_blocks(weight, block)
    error = (dequantize_blocks(codes, scale, block, torch.float32) - weight).abs()
    step = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns] * 2.0**-9
    assert (error <= torch.maximum(weight.abs() / 16, step / 2) * 1.001).all()
    assert codes.float().abs().max() == FP8_MAX


@pytest.mark.parametrize("value", [2.0**-149, 1e-44, 3e-43, 1e-40])
def test_values_too_small_for_a_scale_stay_finite(value: float) -> None:
    """Where largest / 448 is 0 in float32, the smallest float32 is the scale."""
    codes, scale = quantize_blocks(torch.tensor([[value, 0.0]]), (1, 2))
    assert scale > 0
    error = dequantize_blocks(codes, scale, (1, 2), torch.float64) - torch.tensor([[value, 0.0]]).double()
    assert (error.abs() <= value / 2).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_becomes_nan_codes(bad: float) -> None:
    """Damage stays visible: a block with a NaN or an infinity holds a NaN code afterwards."""
    weight = torch.ones(4, 300)
    weight[1, 200] = bad
    codes, _ = quantize_blocks(weight, (2, 128))
    assert codes.float().isnan().nonzero().tolist() == [[1, 200]]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_weights_stay_empty(shape: tuple[int, int]) -> None:
    """A shape without items needs no special case."""
    codes, scale = quantize_blocks(torch.zeros(shape), (128, 128))
    assert (codes.shape, scale.shape) == (shape, scale_shape(*shape, (128, 128)))
    assert dequantize_blocks(codes, scale, (128, 128), torch.bfloat16).shape == shape


def test_dequantising_is_much_faster_than_the_twin() -> None:
    """bf16 from a weight of an expert's size: the best of a few runs each, on one thread."""
    weight, threads = random_codes(1024, 7168), torch.get_num_threads()
    weight.view(torch.uint8).bitwise_and_(0xFE)
    scale = random_scale(weight, (128, 128), torch.float32)
    best = []
    torch.set_num_threads(1)
    try:
        for function in (dequantize, dequantize_blocks):
            times = []
            for _ in range(4):
                start = time.process_time()
                function(weight, scale, (128, 128), torch.bfloat16)
                times.append(time.process_time() - start)
            best.append(min(times))
    finally:
        torch.set_num_threads(threads)
    assert best[1] * 3 < best[0], best  # about 10 on an idle machine
