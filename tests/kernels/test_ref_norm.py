"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nextn.kernels.ref.norm import rms_norm
from tests.compare import Kind, assert_close


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float64, "fp64"), (torch.float32, "fp32-op"), (torch.bfloat16, "bf16-op")]
)
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 64), (0, 8)])
def test_it_is_the_formula(dtype: torch.dtype, kind: Kind, shape: tuple[int, ...]) -> None:
    """Any leading shape; the result has x's dtype."""
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    actual = rms_norm(x, weight, 1e-6)
    assert actual.dtype == dtype
    assert_close(actual, formula(x, weight, 1e-6).to(dtype), kind)


def test_bfloat16_is_normalised_in_float32() -> None:
    """Values whose squares overflow or vanish in fewer bits still come out at size one."""
    x = torch.full((1, 512), 3e4, dtype=torch.bfloat16)
    out = rms_norm(x, torch.ones(512, dtype=torch.bfloat16), 1e-6)
    assert_close(out, torch.ones_like(out), "bf16-op")


def test_epsilon_bounds_small_rows_and_nan_stays_in_its_row() -> None:
    """A row of zeros gives zeros, and a row of NaN leaves its neighbours alone."""
    x = torch.zeros(3, 4)
    x[1] = float("nan")
    x[2] = 1e-3
    out = rms_norm(x, torch.ones(4), 1e-6)
    assert out[0].eq(0).all()
    assert out[1].isnan().all()
    assert_close(out[2], torch.full((4,), 0.5**0.5), "fp32-op")
