"""Launches of kernels/router.py: DeepSeek-V3's router, and one of DeepSeek-V2 with softmax."""

from __future__ import annotations

import torch

from nextn.kernels import router


def _route(tokens: int, dtype: torch.dtype, experts: int, scoring: str, method: str, groups: int) -> None:
    router.route_tokens(
        torch.zeros(tokens, 7168, dtype=torch.bfloat16),
        torch.zeros(experts, 7168, dtype=dtype),
        torch.zeros(experts) if method == "noaux_tc" else None,
        torch.ones(tokens, dtype=torch.bool),
        scoring=scoring,  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        top_k=8,
        n_group=groups,
        topk_group=max(1, groups // 2),
        norm_topk_prob=True,
        scaling=2.5,
    )


def decode_bfloat16() -> None:
    _route(4, torch.bfloat16, 256, "sigmoid", "noaux_tc", 8)


def decode_float32() -> None:
    _route(4, torch.float32, 256, "sigmoid", "noaux_tc", 8)


def prefill_float32() -> None:
    _route(4096, torch.float32, 256, "sigmoid", "noaux_tc", 8)


def softmax_of_160() -> None:
    _route(512, torch.bfloat16, 160, "softmax", "group_limited_greedy", 8)
