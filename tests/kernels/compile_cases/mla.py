"""Launches of kernels/mla.py at DeepSeek-V3's sizes, whole (128 heads) and one of eight ranks (16 heads)."""

from __future__ import annotations

import torch

from nextn.kernels import mla
from nextn.kernels.ref.rope import RotaryTables

Q_LORA, KV_LORA, ROPE, NOPE, V = 1536, 512, 64, 128, 128
POSITIONS = torch.arange(4)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _rotary(interleave: bool) -> RotaryTables:
    return RotaryTables(torch.zeros(8, ROPE // 2), torch.zeros(8, ROPE // 2), interleave)


def _prepare(parts: int, q_lora: int, slots: torch.Tensor | None, valid: torch.Tensor | None) -> None:
    latent = KV_LORA + ROPE
    mla.prepare_latents(
        torch.zeros(parts, 4, q_lora + latent),
        _bf16(q_lora) if q_lora else None,
        _bf16(KV_LORA),
        1e-6,
        _rotary(True),
        POSITIONS,
        slots,
        valid,
        _bf16(2, 64, latent),
        _bf16(2, 2, latent),
    )


def latents_of_a_tree() -> None:
    _prepare(14, Q_LORA, torch.arange(4), torch.ones(4, dtype=torch.bool))


def latents_of_a_beam() -> None:
    _prepare(14, Q_LORA, None, None)


def latents_without_q_lora() -> None:
    _prepare(4, 0, torch.arange(4), None)


def _absorb(parts: int, heads: int, interleave: bool) -> None:
    kv_b = _bf16(heads, NOPE + V, KV_LORA)
    mla.absorb_queries(
        torch.zeros(parts, 4, heads * (NOPE + ROPE)), kv_b[:, :NOPE], _rotary(interleave), POSITIONS
    )


def queries_of_a_rank() -> None:
    _absorb(8, 16, True)


def queries_of_all_heads() -> None:
    _absorb(2, 128, False)
