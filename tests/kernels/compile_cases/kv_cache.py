"""Launches of kernels/kv_cache.py at DeepSeek-V3's latent of 576 columns."""

from __future__ import annotations

import torch

from nextn.kernels import kv_cache


def _cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(3, 2, 64, 576, dtype=dtype)


def compact_short_path_bfloat16() -> None:
    slots = torch.arange(6).view(2, 3)
    kv_cache.compact(_cache(torch.bfloat16), slots, slots, torch.ones(2, 3, dtype=torch.bool))


def compact_longest_path_float64() -> None:
    slots = torch.arange(64).view(1, 64)
    kv_cache.compact(_cache(torch.float64), slots, slots, torch.ones(1, 64, dtype=torch.bool))
