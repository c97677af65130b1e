"""Block-scaled FP8: dequantisation element by element, and the linear layer over it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.kernels.ref.gemm import FP8, dequantize, linear, scale_shape
from tests.compare import assert_close


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), block=st.sampled_from([(2, 3), (4, 4), (1, 8)]))
def test_each_element_has_its_blocks_scale(rows: int, columns: int, block: tuple[int, int]) -> None:
    """w[i, j] * scale[i // bn, j // bk], the last blocks being short (ceil division)."""
    weight = torch.randn(rows, columns).to(FP8)
    scale = torch.rand(scale_shape(rows, columns, block)) + 0.5
    actual = dequantize(weight, scale, block, torch.float32)
    for i in range(rows):
        for j in range(columns):
            expected = float(weight[i, j].float() * scale[i // block[0], j // block[1]])
            assert float(actual[i, j]) == expected


def test_576_rows_have_five_scale_rows() -> None:
    """kv_a_proj_with_mqa of V3: four whole blocks and 64 rows of a fifth."""
    assert scale_shape(576, 7168, (128, 128)) == (5, 56)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_rounded_once(dtype: torch.dtype) -> None:
    """float32 products for bfloat16, exact float64 ones for float64, also for stacks of experts."""
    weight, scale = torch.randn(3, 200, 130).to(FP8), torch.rand(3, 2, 2)
    wide = scale.double().repeat_interleave(128, 1)[:, :200].repeat_interleave(128, 2)[:, :, :130]
    work = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (weight.to(work) * wide.to(work)).to(dtype)
    assert_close(dequantize(weight, scale, (128, 128), dtype), expected, "bitwise")


def test_linear_takes_both_kinds_of_weights() -> None:
    """With scales it is the product with the dequantised weight; without, the plain one."""
    x, weight, scale = torch.randn(5, 130), torch.randn(200, 130).to(FP8), torch.rand(2, 2)
    plain = dequantize(weight, scale, (128, 128), torch.float32)
    expected = (x.double() @ plain.double().T).float()
    assert_close(linear(x, weight, scale, (128, 128)), expected, "fp32-op")
    assert_close(linear(x, plain, None, (128, 128)), expected, "fp32-op")
