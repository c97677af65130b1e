"""Launches of kernels/vocab.py at DeepSeek-V3's vocabulary, and at one of eight ranks' share of it."""

from __future__ import annotations

import torch

from nextn.kernels import vocab
from nextn.kernels.ref.sampling import SamplingBatch

VOCAB, SHARE = 129_280, 16_160


def _batch(rows: int, sampled: bool) -> SamplingBatch:
    real, whole = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    none = torch.zeros(0, 0)
    return SamplingBatch(
        real, whole, real, real, real, real, real, whole, whole, none, none, sampled, False, False
    )


def _children(size: int, k: int, sampled: bool, dtype: torch.dtype = torch.float32, tau: float = 1.0) -> None:
    logits, noise = torch.zeros(2, 4, size, dtype=dtype), torch.zeros(2, 1, size, dtype=dtype)
    vocab.best_children(logits, _batch(2, sampled), noise, k, tau)


def greedy_children() -> None:
    _children(SHARE, 4, False)


def sampled_children() -> None:
    _children(SHARE, 4, True)


def sampled_children_float64() -> None:
    _children(VOCAB, 4, True, torch.float64, 0.8)


def most_children() -> None:
    _children(VOCAB, 64, True)


def picked_tokens() -> None:
    for size, sampled in ((SHARE, False), (VOCAB, True)):
        logits, noise = torch.zeros(2, 4, size), torch.zeros(2, 3, size)
        vocab.pick_tokens(logits, _batch(2, sampled), noise, torch.zeros(2, 4, dtype=torch.int64))


def plain_decoding_of_one_row() -> None:
    level = torch.zeros(1, 1, dtype=torch.int64)
    vocab.pick_tokens(torch.zeros(1, 1, SHARE), _batch(1, False), torch.zeros(1, 1, 1), level)


def noise() -> None:
    vocab.level_noise(_batch(2, True), torch.zeros(2, dtype=torch.int64), 3, VOCAB, torch.float32)
