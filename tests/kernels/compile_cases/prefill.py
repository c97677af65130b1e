"""Launches of kernels/prefill.py at DeepSeek-V3's sizes: one rank of eight, with and without TMA."""

from __future__ import annotations

import torch
from torch import Tensor

from nextn.kernels import prefill
from nextn.kernels.prefill import PrefillConfig, PrefillSizes

HEADS, NOPE, ROPE, V, LORA, PAGE = 16, 128, 64, 128, 512, 64


def _attend(chunk: int, prefix: int, config: PrefillConfig | None = None) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    weight = zeros(HEADS, NOPE + V, LORA)
    pages = -(-prefix // PAGE)
    prefill.prefill_attention(
        zeros(chunk, HEADS, NOPE + ROPE),
        zeros(pages + 1, PAGE, LORA + ROPE),
        torch.arange(pages).view(1, pages),
        (0, chunk),
        (prefix,),
        zeros(chunk, LORA + ROPE),
        weight[:, :NOPE],
        weight[:, NOPE:],
        0.1,
        config=config,
    )


def chunk_after_a_prefix() -> None:
    _attend(256, 128)


def short_chunk() -> None:
    _attend(8, 0)


def chunk_by_pointers() -> None:
    _attend(256, 0, prefill.choose_config(PrefillSizes(HEADS, NOPE - 1, V, LORA + ROPE), 256))
