"""Launches of kernels/moe.py: DeepSeek-V3's experts, whole and as one of eight ranks has them."""

from __future__ import annotations

import torch

from nextn.kernels import moe
from nextn.kernels.ref.gemm import FP8, Block, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts

HIDDEN, EXPERTS, BLOCK = 7168, 256, (128, 128)


def _tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)  # never touched, so it takes no memory


def _pair(*size: int, fp8: bool = True, block: Block = BLOCK) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight and its scales, if it is FP8."""
    scales = (*size[:-2], *scale_shape(size[-2], size[-1], block))
    weight = _tensor(*size, dtype=FP8 if fp8 else torch.bfloat16)
    return weight, _tensor(*scales, dtype=torch.float32) if fp8 else None


def _run(tokens: int, width: int, fp8: bool = True) -> None:
    w13, scale13 = _pair(EXPERTS, 2 * width, HIDDEN, fp8=fp8)
    w2, scale2 = _pair(EXPERTS, HIDDEN, width, fp8=fp8)
    s13, sscale13 = _pair(2 * width, HIDDEN, fp8=fp8)
    s2, sscale2 = _pair(HIDDEN, width, fp8=fp8)
    moe.moe_summands(
        _tensor(tokens, HIDDEN, dtype=torch.bfloat16),
        _tensor(tokens, 8, dtype=torch.float32),
        _tensor(tokens, 8, dtype=torch.int64),
        ExpertWeights(w13, w2, scale13, scale2, BLOCK),
        SharedExperts(s13, s2, sscale13, sscale2),
    )


def rank_decode() -> None:
    _run(4, 256)


def one_token_with_shared_experts_apart() -> None:
    """FP8 routed experts and plain shared ones: launches of one row each."""
    (w13, scale13), (w2, scale2) = _pair(EXPERTS, 512, HIDDEN), _pair(EXPERTS, HIDDEN, 256)
    moe.moe_summands(
        _tensor(1, HIDDEN, dtype=torch.bfloat16),
        _tensor(1, 8, dtype=torch.float32),
        _tensor(1, 8, dtype=torch.int64),
        ExpertWeights(w13, w2, scale13, scale2, BLOCK),
        SharedExperts(
            _tensor(512, HIDDEN, dtype=torch.bfloat16), _tensor(HIDDEN, 256, dtype=torch.bfloat16), None, None
        ),
    )


def rows_shorter_than_a_sector() -> None:
    """w2 of 16 FP8 columns, as of a tiny model."""
    (w13, scale13), (w2, scale2) = _pair(8, 32, 64, block=(16, 16)), _pair(8, 64, 16, block=(16, 16))
    moe.moe_summands(
        _tensor(4, 64, dtype=torch.bfloat16),
        _tensor(4, 2, dtype=torch.float32),
        _tensor(4, 2, dtype=torch.int64),
        ExpertWeights(w13, w2, scale13, scale2, (16, 16)),
        None,
    )


def rank_decode_64() -> None:
    _run(64, 256)


def rank_prefill_4096() -> None:
    _run(4096, 256)


def whole_decode() -> None:
    _run(4, 2048)


def whole_prefill_2048() -> None:
    _run(2048, 2048)


def bfloat16_prefill_2048() -> None:
    _run(2048, 256, fp8=False)


def bfloat16_decode() -> None:
    _run(4, 256, fp8=False)


def bfloat16_prefill_8192() -> None:
    _run(8192, 256, fp8=False)
