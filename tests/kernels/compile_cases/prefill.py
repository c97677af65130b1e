"""Launches of kernels/prefill.py at DeepSeek-V3's sizes: one rank of eight, with and without TMA."""

from __future__ import annotations

import torch
from torch import Tensor

from nextn.kernels import prefill
from nextn.kernels.prefill import PrefillConfig, PrefillSizes, plan_prefill_attention

PROCESSORS = 132
HEADS, NOPE, ROPE, V, LORA, PAGE = 16, 128, 64, 128, 512, 64


def _attend(
    chunk: int, prefix: int, config: PrefillConfig | None = None, nope: int = NOPE, v: int = V
) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    sizes = PrefillSizes(HEADS, nope, v, LORA + ROPE)
    plan = plan_prefill_attention(
        (0, chunk), (prefix,), sizes, torch.device("cpu"), config=config, processors=PROCESSORS
    )
    weight = zeros(HEADS, nope + v, LORA)
    pages = -(-prefix // PAGE)
    prefill.prefill_attention(
        zeros(chunk, HEADS, nope + ROPE),
        zeros(pages + 1, PAGE, LORA + ROPE),
        torch.arange(pages).view(1, pages),
        (0, chunk),
        (prefix,),
        zeros(chunk, LORA + ROPE),
        weight[:, :nope],
        weight[:, nope:],
        0.1,
        plan=plan,
    )


def chunk_after_a_prefix() -> None:
    _attend(256, 128)


def chunk_in_pieces() -> None:
    _attend(128, 1024, PrefillConfig(128, 64, 8, 3, True, piece=64))


def short_chunk() -> None:
    _attend(8, 0)


def wider_heads() -> None:
    _attend(256, 128, nope=192, v=256)


def wider_heads_in_a_short_chunk() -> None:
    _attend(8, 0, nope=192, v=256)


def chunk_by_pointers() -> None:
    _attend(256, 0, prefill.choose_config(PrefillSizes(HEADS, NOPE - 1, V, LORA + ROPE), 256))
