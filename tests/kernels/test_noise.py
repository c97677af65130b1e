"""The Gumbel kernel gives its twin's noise, and the twin gives Philox's known answers."""

from __future__ import annotations

import pytest
import torch

from nextn.kernels import noise, ops
from nextn.kernels.ref import sampling as ref
from tests.compare import Kind, assert_close

KINDS: dict[torch.dtype, Kind] = {torch.float64: "fp64", torch.float32: "fp32-op", torch.bfloat16: "bf16-op"}


def rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, positions and choices [5]: zeros, bit 63 of a seed, both words of a key, large positions."""
    seed = torch.tensor([0, -1, 2**63 - 1, 1 << 32, int(torch.randint(2**62, ()))], device=device)
    position = torch.tensor([0, 1, 163_839, 7, 2**31 - 1], device=device)
    return seed, position, torch.tensor([0, 0, 1, 2, 127], device=device)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [1, 1000, 1024, 1025])
def test_gumbel_noise_equals_its_twin(vocab, dtype, device):
    seed, position, choice = rows(device)
    actual = noise.gumbel_noise(seed, position, choice, vocab, dtype)
    assert_close(actual, ref.gumbel_noise(seed, position, choice, vocab, dtype), KINDS[dtype])


def test_gumbel_noise_of_a_row_ignores_its_neighbours(device):
    """Any order and any subset of rows give the same bits, also from tensors that are not contiguous."""
    seed, position, choice = rows(device)
    full = noise.gumbel_noise(seed, position, choice, 300, torch.float32)
    some = noise.gumbel_noise(
        seed.flip(0)[::2], position.flip(0)[::2], choice.flip(0)[::2], 300, torch.float32
    )
    assert_close(some, full.flip(0)[::2], "bitwise")


def test_gumbel_noise_of_no_rows_is_empty(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert noise.gumbel_noise(none, none, none, 10, torch.float32).shape == (0, 10)


def test_gumbel_noise_refuses_other_shapes_and_dtypes(device):
    row = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match=r"position must be \[2\], is \(1,\)"):
        noise.gumbel_noise(row, row[:1], row, 10, torch.float32)
    with pytest.raises(AssertionError, match="choice must be int64"):
        noise.gumbel_noise(row, row, row.int(), 10, torch.float32)


def test_ops_choose_by_device(device):
    seed, position, choice = rows(device)
    family = noise if device.type == "cuda" else ref
    expected = family.gumbel_noise(seed, position, choice, 50, torch.float32)
    assert_close(ops.gumbel_noise(seed, position, choice, 50, torch.float32), expected, "bitwise")
