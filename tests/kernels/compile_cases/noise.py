"""Launches of kernels/noise.py at DeepSeek-V3's vocabulary."""

from __future__ import annotations

import torch

from nextn.kernels import noise

VOCAB = 129_280


def float32() -> None:
    row = torch.zeros(8, dtype=torch.int64)
    noise.gumbel_noise(row, row, row, VOCAB, torch.float32)


def float64() -> None:
    row = torch.zeros(8, dtype=torch.int64)
    noise.gumbel_noise(row, row, row, VOCAB, torch.float64)
