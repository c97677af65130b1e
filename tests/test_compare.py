"""The comparison that every tolerance goes through: what it lets pass, what it refuses, and what it says."""

from __future__ import annotations

import pytest
import torch

from tests.compare import TOLERANCES, assert_close
from tests.conftest import poison_


@pytest.mark.parametrize("kind", [kind for kind in TOLERANCES if kind != "bitwise"])
def test_a_row_accepts_half_its_bound_and_refuses_twice(kind):
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    bound = TOLERANCES[kind].bound
    assert_close(expected * (1 + bound / 2), expected, kind)
    with pytest.raises(AssertionError, match="4 of 4 elements differ"):
        assert_close(expected * (1 + 2 * bound), expected, kind)


def test_the_first_and_the_worst_coordinate_are_named():
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[0, 2], actual[1, 1] = 1.5, 3.0
    with pytest.raises(
        AssertionError, match=r"rows: 2 of 6 .*\n  first at \(0, 2\): 1\.5.*\n  worst at \(1, 1\)"
    ):
        assert_close(actual, expected, "fp32-op", what="rows")


def test_a_small_number_left_by_cancellation_is_judged_by_its_tensor():
    expected = torch.tensor([100.0, -100.0, 1e-6])
    assert_close(expected + torch.tensor([0.0, 0.0, 1e-5]), expected, "fp32-op")


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_equals_itself_alone(special):
    expected = torch.tensor([1.0, special])
    assert_close(expected.clone(), expected, "fp32-op")
    for other in {0.0, float("inf"), float("-inf"), float("nan")} - {special}:
        if other == other or special == special:
            with pytest.raises(AssertionError, match="1 of 2 elements"):
                assert_close(torch.tensor([1.0, other]), expected, "fp32-op")


def test_bitwise_tells_zeros_apart():
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        assert_close(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "bitwise")


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)])
def test_shapes_and_dtypes_must_agree(other):
    with pytest.raises(AssertionError, match=r"value: (shape|dtype)"):
        assert_close(other, torch.zeros(2), "fp32-op")


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_tensors_are_equal(shape):
    assert_close(torch.zeros(shape), torch.zeros(shape), "fp64")
    assert_close(torch.zeros(shape), torch.zeros(shape), "bitwise")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_is_nan_in_every_float_type(dtype):
    assert poison_(torch.zeros(3, dtype=dtype)).float().isnan().all()
