"""Launches of kernels/attention.py at DeepSeek-V3's latent: one rank's 16 heads, and all 128."""

from __future__ import annotations

import torch

from nextn.kernels import attention

PROCESSORS = 132  # SMs of an H200


def _decode(rows: int, nodes: int, heads: int, *, page_size: int = 64, tail_len: int = 4) -> None:
    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    prefix_lens = torch.zeros(rows, dtype=torch.int64)
    plan = attention.plan_attention(prefix_lens, tail_len, page_size=page_size)
    config = attention.choose_config(rows, nodes, heads, 128, PROCESSORS, plan.block_kv)
    attention.decode_attention(
        bf16(rows * nodes, heads, 576),
        bf16(4, page_size, 576),
        torch.zeros(rows, 4, dtype=torch.int64),
        prefix_lens,
        bf16(rows, tail_len, 576),
        torch.ones(rows, nodes, dtype=torch.int64),
        0.1,
        bf16(heads, 256, 512)[:, 128:],
        plan=plan,
        config=config._replace(roles=False),  # that kernel has cases of its own
    )


def one_row_tree() -> None:
    _decode(1, 4, 16)


def one_row_plain() -> None:
    """Rows and nodes of 1, which Triton makes constants."""
    _decode(1, 1, 16)


def many_rows_tree() -> None:
    _decode(16, 4, 16)


def long_tail_all_heads() -> None:
    _decode(2, 8, 128, tail_len=40)


def odd_pages() -> None:
    _decode(2, 4, 16, page_size=48)
