"""Launches of kernels/norm.py at DeepSeek-V3's sizes."""

from __future__ import annotations

import torch

from nextn.kernels import norm

HIDDEN = 7168


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def add_norm_of_attention() -> None:
    norm.add_norm(_bf16(4, HIDDEN), torch.zeros(4, 4, HIDDEN), _bf16(HIDDEN), 1e-6)


def add_norm_of_experts() -> None:
    valid = torch.ones(4, dtype=torch.bool)
    norm.add_norm(_bf16(4, HIDDEN), torch.zeros(9, 4, HIDDEN), _bf16(HIDDEN), 1e-6, valid)


def add_norm_of_many_summands() -> None:
    norm.add_norm(None, torch.zeros(16, 1, HIDDEN), _bf16(HIDDEN), 1e-6)


def add_norm_of_a_prefill() -> None:
    norm.add_norm(_bf16(4096, HIDDEN), _bf16(1, 4096, HIDDEN), _bf16(HIDDEN), 1e-6)


def final_norm() -> None:
    norm.rms_norm(_bf16(2, 4, HIDDEN), _bf16(HIDDEN), 1e-6)


def join_norms() -> None:
    norm.join_norms(_bf16(4, HIDDEN), _bf16(4, HIDDEN), _bf16(HIDDEN), _bf16(HIDDEN), 1e-6)


def silu_of_a_dense_layer() -> None:
    norm.silu_and_mul_summands(torch.zeros(14, 4, 2 * 2304))
