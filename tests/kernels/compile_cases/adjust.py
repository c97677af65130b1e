"""Launches of kernels/adjust.py at one of eight ranks' share of DeepSeek-V3's vocabulary.

A longer one takes the same kernel, in more blocks.
"""

from __future__ import annotations

import torch

from nextn.kernels import adjust
from nextn.kernels.ref.sampling import SamplingBatch

SHARE = 16_160


def _adjust(filters: bool, penalties: bool, biases: bool, grammar: bool) -> None:
    real, whole = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    batch = SamplingBatch(
        real, whole, real, real, real, real, real, whole, whole,
        torch.zeros(2, SHARE, dtype=torch.int32), torch.zeros(2, SHARE, dtype=torch.bool),
        any_sampled=True, any_filter=filters, any_penalty=penalties, any_bias=biases,
        bias_ids=torch.zeros(2, 300, dtype=torch.int64), bias_values=torch.zeros(2, 300),
        banned_ids=torch.zeros(2, 32, dtype=torch.int64), ban_until=whole,
        grammar=torch.zeros(2, 4, -(-SHARE // 32), dtype=torch.int32) if grammar else None,
    )  # fmt: skip
    path = torch.zeros(2, 4, 3, dtype=torch.int64)
    adjust.adjust_logits(torch.zeros(2, 4, SHARE), batch, (path, path.bool()), path[..., 0])


def filtered() -> None:
    _adjust(True, False, False, False)


def everything() -> None:
    _adjust(True, True, True, True)
