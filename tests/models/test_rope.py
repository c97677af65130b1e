"""Rotary tables built from a config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextn.config import ModelConfig, yarn_mscale
from nextn.kernels.ref.rope import RotaryTables, rope_rows
from nextn.models.mla import Rotary
from nextn.models.parallel import Placement
from tests.models.build import CPU, tiny_dict

V3 = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def rotary(scaling: dict[str, Any] | None, **changes: Any) -> RotaryTables:
    """Float64 tables of 4 positions and V3's 64 rotary dimensions."""
    config = tiny_dict(rope_scaling=scaling, qk_rope_head_dim=64, **changes)
    return Rotary(ModelConfig.from_dict(config), 4, Placement(torch.float64, CPU)).tables


def test_v3_turns_with_multiplier_one() -> None:
    """mscale = mscale_all_dim cancel: the first pair has plain cosines, the 16th YaRN's frequency 0.0055."""
    table = rotary(V3)
    assert float(table.cos[1, 0]) == pytest.approx(0.5403023058681398, abs=1e-15)
    assert float(table.sin[1, 16]) == pytest.approx(0.0055, rel=1e-4)
    assert table.interleave


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "multiplier"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (1.0, 0.0, yarn_mscale(40, 1.0)),
        (0.5, 1.0, yarn_mscale(40, 0.5) / yarn_mscale(40, 1.0)),
    ],
)
def test_the_multiplier_is_a_ratio_of_magnitudes(
    mscale: float, mscale_all_dim: float, multiplier: float
) -> None:
    """cos at position 0 is m(F, mscale) / m(F, mscale_all_dim); an absent mscale_all_dim counts as 0."""
    scaling = V3 | {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    if not mscale_all_dim:
        del scaling["mscale_all_dim"]
    assert float(rotary(scaling).cos[0, 0]) == pytest.approx(multiplier, rel=1e-15)


def test_without_scaling_it_is_plain_rope() -> None:
    """Frequencies theta^(-2i/dim), with the config's theta."""
    table = rotary(None, rope_theta=50000.0)
    assert float(table.sin[1, 31]) == pytest.approx(50000.0 ** (-62 / 64), rel=1e-6)


def test_half_split_layout_is_read_from_the_config() -> None:
    """rope_interleave false reaches the rows that layers use."""
    table = rotary(None, rope_interleave=False)
    assert not table.interleave
    cos, sin = rope_rows(*table[:2], torch.tensor([1, 2]), interleave=table.interleave)
    assert cos.shape == sin.shape == (2, 1, 64)
    assert torch.equal(cos[..., :32], cos[..., 32:])
