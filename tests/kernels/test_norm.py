"""The norm kernels equal their twins, whose parts are what a decoder layer computes step by step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import norm
from nextn.kernels.ref import norm as ref
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")  # hypothesis tests take no function-scoped fixture
EPS = 1e-5


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=WHERE).bfloat16()


def summands_of(parts: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[parts, rows, width], with NaN between the rows and between the summands."""
    wide = poison_(torch.empty(parts, rows + 1, width + 4, device=WHERE, dtype=dtype))
    wide[:, :rows, :width] = torch.randn(parts, rows, width, device=WHERE).to(dtype)
    return wide[:, :rows, :width]


def flags(valid: list[bool]) -> Tensor:
    return torch.tensor(valid, dtype=torch.bool, device=WHERE)


def test_add_norm_equals_its_twin() -> None:
    """The new residual to the bit, since the order of the sum is fixed; any size, any number of summands."""

    @settings(max_examples=15)
    @given(
        st.integers(1, 16),
        st.lists(st.booleans(), min_size=1, max_size=3),
        st.sampled_from([1, 7, 32, 576]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def check(
        parts: int, valid: list[bool], size: int, masked: bool, with_residual: bool, dtype: torch.dtype
    ) -> None:
        rows = len(valid)
        summands, weight = summands_of(parts, rows, size, dtype), bf16(size)
        residual = bf16(rows, size + 2)[:, :size] if with_residual else None
        kept = flags(valid) if masked else None
        if kept is not None:
            summands.masked_fill_(~kept[:, None], torch.nan)
        actual = norm.add_norm(residual, summands, weight, EPS, kept)
        expected = ref.add_norm(residual, summands, weight, EPS, kept)
        assert_close(actual[0], expected[0], "bitwise", what="residual")
        assert_close(actual[1], expected[1], "bf16-op", what="normed")

    check()


def test_a_row_of_nan_stays_alone() -> None:
    """Its neighbours get the bits that they get without it."""
    residual, summands, weight = bf16(3, 40), summands_of(3, 3, 40), bf16(40)
    alone = norm.add_norm(residual[2:], summands[:, 2:], weight, EPS)
    summands[1, 1] = torch.nan
    total, normed = norm.add_norm(residual, summands, weight, EPS)
    assert total[1].isnan().all()
    assert_close(total[2:], alone[0], "bitwise")
    assert_close(normed[2:], alone[1], "bitwise")


def test_the_residual_is_rounded_before_it_is_normalised() -> None:
    """normed is the norm of the residual that the next layer reads, not of a finer one."""
    summands, weight = summands_of(2, 4, 64), bf16(64)
    total, normed = norm.add_norm(None, summands, weight, EPS)
    assert_close(normed, norm.rms_norm(total, weight, EPS), "bitwise")


@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 64), (0, 8)])
def test_rms_norm_equals_its_twin(shape: tuple[int, ...]) -> None:
    x, weight = bf16(*shape), bf16(shape[-1])
    assert_close(norm.rms_norm(x, weight, EPS), ref.rms_norm(x, weight, EPS), "bf16-op")


@pytest.mark.parametrize("size", [7, 64])
def test_join_norms_puts_the_embedding_first(size: int) -> None:
    """Rows may be further apart than they are long."""
    embedding, hidden = bf16(3, size + 5)[:, :size], bf16(3, size)
    weights = (bf16(size), bf16(size))
    actual = norm.join_norms(embedding, hidden, *weights, EPS)
    assert_close(actual, ref.join_norms(embedding, hidden, *weights, EPS), "bf16-op")
    assert_close(actual[:, :size], norm.rms_norm(embedding, weights[0], EPS), "bitwise")


@pytest.mark.parametrize(("parts", "half", "dtype"), [(1, 16, torch.bfloat16), (14, 20, torch.float32)])
def test_silu_and_mul_equals_its_twin(parts: int, half: int, dtype: torch.dtype) -> None:
    summands = summands_of(parts, 3, 2 * half, dtype)
    actual = norm.silu_and_mul_summands(summands)
    assert_close(actual, ref.silu_and_mul_summands(summands).bfloat16(), "bf16-op")


def test_silu_and_mul_in_several_blocks() -> None:
    """Every column of a result wider than a block, at gates from -40 to 40."""
    summands = summands_of(2, 2, 600) * 10
    config = norm.SiluConfig(block=128, warps=1)
    actual = norm.silu_and_mul_summands(summands, config=config)
    assert_close(actual, ref.silu_and_mul_summands(summands).bfloat16(), "bf16-op")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_summand_gives_the_bits_of_separate_steps(dtype: torch.dtype) -> None:
    """Wide types prove the engine exact, so the fused twins may not round or reorder anything."""
    x, out, weight = (torch.randn(*shape, dtype=dtype) for shape in ((5, 48), (5, 48), (48,)))
    total, normed = ref.add_norm(x, out[None], weight, EPS)
    assert_close(total, x + out, "bitwise")
    assert_close(normed, F.rms_norm(x + out, (48,), weight, EPS), "bitwise")
    gate, up = out.chunk(2, -1)
    assert_close(ref.silu_and_mul_summands(out[None]), F.silu(gate) * up, "bitwise")


def test_the_twin_adds_summands_in_order() -> None:
    """float32 sums depend on the order, and the kernels promise this one."""
    summands = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    assert ref.sum_summands(summands).item() == 0.0
    assert ref.sum_summands(summands.flip(0)).item() == 0.0
    assert ref.sum_summands(summands[[0, 2, 1]]).item() == 1.0


def test_nothing_to_do_launches_nothing() -> None:
    weight = bf16(16)
    total, normed = norm.add_norm(None, summands_of(2, 0, 16), weight, EPS)
    assert total.shape == normed.shape == (0, 16)
    assert norm.join_norms(bf16(0, 16), bf16(0, 16), weight, weight, EPS).shape == (0, 32)
    assert norm.silu_and_mul_summands(summands_of(2, 0, 16)).shape == (0, 8)


def test_kernels_refuse_what_they_would_misread() -> None:
    weight, summands = bf16(16), summands_of(1, 2, 16)
    with pytest.raises(AssertionError, match="weight must be bfloat16"):
        norm.add_norm(None, summands, weight.float(), EPS)
    with pytest.raises(AssertionError, match=r"residual must be \[2, 16\]"):
        norm.add_norm(bf16(1, 16), summands, weight, EPS)
    with pytest.raises(AssertionError, match="columns must be adjacent"):
        norm.add_norm(None, summands.transpose(1, 2), bf16(2), EPS)
    with pytest.raises(AssertionError, match="float32 or bfloat16"):
        norm.silu_and_mul_summands(summands.double())
    with pytest.raises(AssertionError, match="of one width"):
        norm.silu_and_mul_summands(summands[..., :15])
    with pytest.raises(AssertionError, match="hidden must be bfloat16"):
        norm.join_norms(bf16(2, 16), summands[0], weight, weight, EPS)
