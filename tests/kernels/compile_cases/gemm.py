"""Launches of kernels/gemm.py at the shapes of DeepSeek-V3 as one of eight tensor-parallel ranks."""

from __future__ import annotations

import torch

from nextn.kernels import gemm


def _x(tokens: int, columns: int) -> torch.Tensor:
    return torch.zeros(tokens, columns, dtype=torch.bfloat16)


def _fp8(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.zeros(gemm.scale_shape(rows, columns, (128, 128)))
    return torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), scale


def latent_down_4_tokens_fp8() -> None:
    gemm.linear_summands(_x(4, 7168), *_fp8(2112, 7168), (128, 128))


def latent_down_64_tokens_fp8() -> None:
    gemm.linear_summands(_x(64, 7168), *_fp8(2112, 7168), (128, 128))


def latent_down_prefill_fp8() -> None:
    gemm.linear_summands(_x(1024, 7168), *_fp8(2112, 7168), (128, 128))


def eh_proj_16_tokens_bf16() -> None:
    """With the kernel that adds the splits."""
    gemm.linear(_x(16, 14336), torch.zeros(7168, 14336, dtype=torch.bfloat16))


def head_64_tokens_bf16() -> None:
    gemm.linear(_x(64, 7168), torch.zeros(16160, 7168, dtype=torch.bfloat16), None, out_dtype=torch.float32)


def eh_proj_prefill_bf16() -> None:
    gemm.linear(_x(1024, 14336), torch.zeros(7168, 14336, dtype=torch.bfloat16))
