"""Launches of kernels/moe.py: DeepSeek-V3's experts, whole and as one of eight ranks has them."""

from __future__ import annotations

import torch

from nextn.kernels import moe
from nextn.kernels.ref.gemm import FP8, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts

HIDDEN, EXPERTS, BLOCK = 7168, 256, (128, 128)


def _tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)  # never touched, so it takes no memory


def _run(tokens: int, width: int, fp8: bool = True) -> None:
    dtype = FP8 if fp8 else torch.bfloat16

    def pair(*size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = (*size[:-2], *scale_shape(size[-2], size[-1], BLOCK))
        return _tensor(*size, dtype=dtype), _tensor(*scales, dtype=torch.float32) if fp8 else None

    w13, scale13 = pair(EXPERTS, 2 * width, HIDDEN)
    w2, scale2 = pair(EXPERTS, HIDDEN, width)
    (s13, sscale13), (s2, sscale2) = pair(2 * width, HIDDEN), pair(HIDDEN, width)
    moe.moe_summands(
        _tensor(tokens, HIDDEN, dtype=torch.bfloat16),
        _tensor(tokens, 8, dtype=torch.float32),
        _tensor(tokens, 8, dtype=torch.int64),
        ExpertWeights(w13, w2, scale13, scale2, BLOCK),
        SharedExperts(s13, s2, sscale13, sscale2),
    )


def rank_decode() -> None:
    _run(4, 256)


def rank_decode_64() -> None:
    _run(64, 256)


def rank_prefill_4096() -> None:
    _run(4096, 256)


def whole_decode() -> None:
    _run(4, 2048)


def whole_prefill_2048() -> None:
    _run(2048, 2048)


def bfloat16_decode() -> None:
    _run(4, 256, fp8=False)


def bfloat16_prefill_8192() -> None:
    _run(8192, 256, fp8=False)
