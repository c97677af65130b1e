"""The linear kernels equal their twins for any weight, shape and cut, whatever unused memory holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import gemm
from nextn.kernels.ref import gemm as ref
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")  # hypothesis tests take no function-scoped fixture
SHAPES = [
    (2112, 7168, True),
    (3072, 1536, True),
    (7168, 2048, True),
    (4608, 7168, True),
    (7168, 2304, True),
    (7168, 14336, False),
    (16160, 7168, False),
    (32, 32, False),
]
SMALL = gemm.Config(16, 16, 3, warps=4, stages=2, block_k=32)


def wide(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A random matrix whose rows lie further apart than they are long, with NaN between them."""
    whole = torch.randn(rows + 1, columns + 16, device=WHERE).to(dtype)
    poison_(whole[:, columns:])
    poison_(whole[rows:])
    return whole[:rows, :columns]


def weight_of(rows: int, columns: int, block: ref.Block | None) -> tuple[Tensor, Tensor | None]:
    """bf16 without a block, else FP8 with scales between 0.5 and 1.5."""
    if block is None:
        return wide(rows, columns, torch.bfloat16), None
    return wide(rows, columns, ref.FP8), torch.rand(ref.scale_shape(rows, columns, block), device=WHERE) + 0.5


def check(tokens: int, rows: int, columns: int, block: ref.Block | None, config: gemm.Config | None) -> None:
    """The summands add up to the product in float32; `linear` is their sum in order, rounded once."""
    x = wide(tokens, columns, torch.bfloat16)
    weight, scale = weight_of(rows, columns, block)
    blocks = block or (128, 128)
    parts = gemm.linear_summands(x, weight, scale, blocks, config=config)
    kind = "fp8-linear" if HAS_CUDA else "fp32-op"  # tensor cores add with fewer bits than float32 has
    assert_close(parts.sum(0), ref.linear(x.float(), weight.float(), scale, blocks), kind)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    for dtype in (torch.float32, torch.bfloat16):
        actual = gemm.linear(x, weight, scale, blocks, out_dtype=dtype, config=config)
        assert_close(actual, total.to(dtype), "bitwise")


@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize("tokens", [1, 4, 17, 64])
def test_equals_its_twin_as_configured(tokens, block):
    check(tokens, 200, 450, block, None)


@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize(("tokens", "rows"), [(70, 96), (130, 40)])
def test_more_tokens_than_few_are_one_summand(tokens, rows, block):
    check(tokens, rows, 300, block, None)
    x, (weight, scale) = wide(tokens, 300, torch.bfloat16), weight_of(rows, 300, block)
    assert gemm.linear_summands(x, weight, scale, block or (128, 128)).shape == (1, tokens, rows)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_large_tiles_in_groups_equal_the_twin(block):
    """Three groups of token tiles, the last of one."""
    check(75, 40, 130, block, replace(SMALL, splits=1, group=2))
    check(33, 40, 130, block, replace(SMALL, splits=1, group=1))


def test_any_cut_of_any_shape_equals_the_twin() -> None:
    """Splits, tiles, orientation and blocks of scales that divide nothing; the smallest sides too."""

    @settings(max_examples=15)
    @given(
        st.sampled_from([1, 3, 16, 21]),
        st.sampled_from([1, 16, 37]),
        st.sampled_from([1, 4, 32, 75, 96]),
        st.sampled_from([None, (8, 8), (16, 32), (3, 5), (64, 24), (32, 64)]),
        st.integers(1, 5),
        st.booleans(),
    )
    def any_cut(
        tokens: int, rows: int, columns: int, block: ref.Block | None, splits: int, first: bool
    ) -> None:
        check(tokens, rows, columns, block, replace(SMALL, splits=splits, weights_first=first))

    any_cut()


def test_a_tokens_nan_stays_in_its_row(device):
    """Padded rows of a batch may hold NaN."""
    x, (weight, scale) = wide(5, 96, torch.bfloat16), weight_of(40, 96, (32, 32))
    clean = gemm.linear(x, weight, scale, (32, 32), config=SMALL)
    poison_(x[1])
    poison_(x[4])
    dirty = gemm.linear(x, weight, scale, (32, 32), config=SMALL)
    assert_close(dirty[[0, 2, 3]], clean[[0, 2, 3]], "bitwise")
    assert dirty[[1, 4]].isnan().all()


@pytest.mark.parametrize(("rows", "columns", "fp8"), SHAPES)
def test_the_order_of_additions_depends_on_the_weight_alone(rows, columns, fp8):
    """Up to 64 tokens splits, K step and orientation are the same; each split has something to add."""
    configs = [gemm.choose_config(n, rows, columns, fp8=fp8) for n in range(1, gemm.DECODE_TOKENS + 1)]
    assert len({(c.splits, c.block_k, c.weights_first) for c in configs}) == 1
    assert all(c.tokens >= n for n, c in enumerate(configs, 1)), "weights are read once"
    steps = -(-columns // configs[0].block_k)
    assert configs[0].splits == 1 or steps // configs[0].splits >= 3


def test_one_token_has_the_bits_it_has_among_others(device):
    x, (weight, scale) = wide(16, 450, torch.bfloat16), weight_of(200, 450, (128, 128))
    every = gemm.linear_summands(x, weight, scale, (128, 128))
    for count in (1, 5):
        assert_close(gemm.linear_summands(x[:count], weight, scale, (128, 128)), every[:, :count], "bitwise")


def test_no_tokens_are_an_empty_result(device):
    x, (weight, scale) = wide(0, 96, torch.bfloat16), weight_of(40, 96, (32, 32))
    assert gemm.linear(x, weight, scale, (32, 32)).shape == (0, 40)
    assert gemm.linear_summands(x, weight, scale, (32, 32), config=SMALL).shape == (3, 0, 40)


def test_kernels_refuse_what_they_would_misread(device):
    x, (weight, scale) = wide(2, 96, torch.bfloat16), weight_of(40, 96, (32, 32))
    assert scale is not None
    with pytest.raises(AssertionError, match="x must be bf16"):
        gemm.linear(x.float(), weight, scale, (32, 32))
    with pytest.raises(AssertionError, match="x has 95 columns, the weight 96"):
        gemm.linear(x[:, 1:], weight, scale, (32, 32))
    with pytest.raises(AssertionError, match="without scales must be bf16"):
        gemm.linear(x, weight)
    with pytest.raises(AssertionError, match="with scales must be"):
        gemm.linear(x, weight.bfloat16(), scale, (32, 32))
    with pytest.raises(AssertionError, match=r"scales must be \[1, 1\], are \[2, 3\]"):
        gemm.linear(x, weight, scale)
    with pytest.raises(AssertionError, match="scales must be float32"):
        gemm.linear(x, weight, scale.double(), (32, 32))
    with pytest.raises(AssertionError, match="must be adjacent"):
        gemm.linear(x, weight.T.contiguous().T, scale, (32, 32))
    with pytest.raises(AssertionError, match="bf16 or float32"):
        gemm.linear(x, weight, scale, (32, 32), out_dtype=torch.float16)


def test_twins_return_one_summand_and_the_wanted_dtype():
    x, weight = wide(3, 50, torch.bfloat16), wide(7, 50, torch.bfloat16)
    single = ref.linear(x, weight)
    assert_close(ref.linear_summands(x, weight, None, (128, 128)), single[None], "bitwise")
    assert single.dtype == torch.bfloat16
    assert_close(
        ref.linear(x, weight, out_dtype=torch.float32), ref.linear(x.float(), weight.float()), "bitwise"
    )
