"""Rotary embedding: YaRN's check vectors, tables, and rotation in both layouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels.ref.rope import apply_rope, plain_frequencies, rope_rows, rope_table, yarn_frequencies
from tests.compare import assert_close

V3 = {"factor": 40.0, "original_max_positions": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
V3_FREQUENCIES = {
    0: 1.0, 8: 0.1, 10: 0.0562341, 11: 0.0390069, 12: 0.0268794, 14: 0.0124480, 16: 0.0055, 18: 0.00224937,
    20: 7.90569e-4, 22: 1.77828e-4, 23: 3.33380e-5, 24: 2.5e-5, 31: 3.33380e-6,
}  # fmt: skip


def test_yarn_has_the_frequencies_of_v3() -> None:
    """Samples of DeepSeek-V3's 32 frequencies to the six digits that are known."""
    frequencies = yarn_frequencies(64, 10000.0, **V3)
    for index, expected in V3_FREQUENCIES.items():
        assert float(frequencies[index]) == pytest.approx(expected, rel=5e-6), index


def test_yarn_of_factor_one_is_plain() -> None:
    """Interpolation by 1 changes nothing, also where the ramp is a step."""
    for beta in (1.0, 32.0):
        yarn = yarn_frequencies(16, 1e4, factor=1.0, original_max_positions=64, beta_fast=beta, beta_slow=1.0)
        assert_close(yarn, plain_frequencies(16, 1e4), "fp64")


def test_equal_betas_make_a_step() -> None:
    """beta_fast = beta_slow leaves some pairs untouched and divides the others (Kimi-K2's config)."""
    frequencies = yarn_frequencies(
        64, 50000.0, factor=32.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0
    )
    ratio = plain_frequencies(64, 50000.0) / frequencies
    assert frequencies.isfinite().all()
    assert float(ratio[0]) == 1.0
    assert float(ratio[-1]) == pytest.approx(32.0)
    assert (ratio.diff() >= -1e-9).all()


def test_tables_are_made_in_float64() -> None:
    """At position 163,839 a float32 table is the rounded float64 one, which float32 angles would miss."""
    frequencies, device = yarn_frequencies(64, 10000.0, **V3), torch.device("cpu")
    narrow = rope_table(frequencies, 1.25, 163_840, dtype=torch.bfloat16, device=device)
    assert narrow[0].dtype == narrow[1].dtype == torch.float32
    angles = [163_839 * float(f) for f in frequencies]
    expected = torch.tensor([1.25 * math.cos(angle) for angle in angles])
    assert_close(narrow[0][-1], expected, "fp32-op")
    assert_close(narrow[1][-1], torch.tensor([1.25 * math.sin(angle) for angle in angles]), "fp32-op")


def rotated(x: Tensor, positions: list[int], *, interleave: bool) -> Tensor:
    """x [N, heads, dim] turned by tables of 64 positions."""
    dim, device = x.shape[-1], x.device
    cos, sin = rope_table(plain_frequencies(dim, 100.0), 1.0, 64, dtype=x.dtype, device=device)
    rows = rope_rows(cos, sin, torch.tensor(positions), interleave=interleave)
    return apply_rope(x, *rows, interleave=interleave)


@pytest.mark.parametrize("interleave", [True, False])
def test_pairs_turn_by_their_angle(interleave: bool) -> None:
    """Each pair, read as a complex number, is multiplied by exp(i position frequency)."""
    x, positions = torch.randn(3, 2, 8, dtype=torch.float64), [0, 5, 63]
    pairs = x.unflatten(-1, (4, 2)) if interleave else torch.stack(x.chunk(2, -1), -1)
    angles = torch.tensor(positions).double()[:, None, None] * plain_frequencies(8, 100.0)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
    expected = turned.flatten(-2) if interleave else torch.cat(turned.unbind(-1), -1)
    assert_close(rotated(x, positions, interleave=interleave), expected, "fp64")


@given(shift=st.integers(0, 40), gap=st.integers(0, 20), interleave=st.booleans())
def test_products_depend_on_distance_only(shift: int, gap: int, interleave: bool) -> None:
    """q at p + gap times k at p is the same for every p."""
    generator = torch.Generator().manual_seed(shift * 100 + gap)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=generator)
    scores = [
        (rotated(q, [p + gap], interleave=interleave) * rotated(k, [p], interleave=interleave)).sum()
        for p in (0, shift)
    ]
    assert abs(scores[0] - scores[1]) < 1e-11


def test_bfloat16_is_turned_in_float32() -> None:
    """The result is rounded once."""
    x = torch.randn(4, 2, 16).to(torch.bfloat16)
    wide = rotated(x.float(), [1, 2, 3, 60], interleave=True)
    assert_close(rotated(x, [1, 2, 3, 60], interleave=True), wide.to(torch.bfloat16), "bitwise")


def test_strided_input() -> None:
    """Slices of wider tensors turn like their copies."""
    wide = torch.randn(3, 2, 24)
    part = wide[..., 8:]
    assert_close(
        rotated(part, [3, 4, 5], interleave=True),
        rotated(part.clone(), [3, 4, 5], interleave=True),
        "bitwise",
    )
