"""Launches of kernels/attention_hopper.py at DeepSeek-V3's latent: one rank's 16 heads, and all 128."""

from __future__ import annotations

import torch

from nextn.kernels import attention_hopper


def _launch(rows: int, nodes: int, heads: int, *, tail_len: int = 4) -> None:
    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    tiles, slots = -(-nodes * heads // 64), 132 + rows - 1
    attention_hopper.launch(
        bf16(rows * nodes, heads, 576),
        bf16(4, 64, 576),
        torch.zeros(rows, 4, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        bf16(rows, tail_len, 576),
        torch.ones(rows, nodes, dtype=torch.int64),
        torch.zeros(rows + 1, dtype=torch.int32),
        bf16(tiles, slots, 64, 512),
        torch.zeros(tiles, slots, 64),
        0.1,
    )


def one_row_tree() -> None:
    _launch(1, 4, 16)


def all_heads_and_a_long_tail() -> None:
    _launch(2, 8, 128, tail_len=40)
