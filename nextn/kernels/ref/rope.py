"""Rotary position embedding, plain or with YaRN's frequencies (Peng et al., 2023, "YaRN", section 3).

Frequencies and tables are made in float64 and rounded once, so that late positions keep their angle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype


class RotaryTables(NamedTuple):
    """One model's factors by position, and how it pairs elements; what kernels that rotate take."""

    cos: Tensor  # [max_positions, rope / 2] float32, or float64 for float64
    sin: Tensor  # [max_positions, rope / 2]
    interleave: bool  # pairs are neighbours, else (i, i + rope / 2)


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2i/dim) for i in 0 .. dim/2 - 1.  # [dim/2] float64"""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int, theta: float, *, factor: float, original_max_positions: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """Plain frequencies for fast pairs, divided by `factor` for slow ones, a linear ramp between.

    A pair is fast when it turns more than `beta_fast` times within `original_max_positions`, and slow below
    `beta_slow` turns.  # [dim/2] float64
    """
    extrapolated = plain_frequencies(dim, theta)
    interpolated = extrapolated / factor

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(original_max_positions / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(beta_fast)), 0)
    high: float = min(math.ceil(pair_with_turns(beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step instead of 0/0
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return interpolated * ramp + extrapolated * (1 - ramp)


def rope_table(
    frequencies: Tensor, multiplier: float, max_positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, times `multiplier`.  # two of [max_positions, dim/2]

    float64 stays float64; any other compute dtype gets float32 tables.
    """
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    table = accumulation_dtype(dtype)
    return (angles.cos() * multiplier).to(device, table), (angles.sin() * multiplier).to(device, table)


def rope_rows(cos: Tensor, sin: Tensor, positions: Tensor, *, interleave: bool) -> tuple[Tensor, Tensor]:
    """The tables' rows at `positions` [N], widened to one factor an element for `apply_rope`.

    The sine carries the sign of the element that it multiplies.  # two of [N, 1, dim], any head
    """
    cos_rows, sin_rows = cos[positions], sin[positions]  # [N, dim/2]
    if interleave:
        wide_cos = torch.stack((cos_rows, cos_rows), -1).flatten(-2)
        wide_sin = torch.stack((-sin_rows, sin_rows), -1).flatten(-2)
    else:
        wide_cos = torch.cat((cos_rows, cos_rows), -1)
        wide_sin = torch.cat((-sin_rows, sin_rows), -1)
    return wide_cos.unsqueeze(1), wide_sin.unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool) -> Tensor:
    """Rotate each pair (a, b) of x [N, heads, dim] to (a cos - b sin, b cos + a sin), in the tables' dtype.

    Pairs are neighbours (2i, 2i+1) when `interleave`, else (i, i + dim/2); the layout is kept either way, so
    cached keys and later queries agree. cos and sin come from `rope_rows`. Returns x's dtype.
    """
    if interleave:
        partner = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).view(x.shape)
    else:
        partner = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, partner.to(cos.dtype), sin).to(x.dtype)
