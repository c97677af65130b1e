"""Root-mean-square normalisation (Zhang and Sennrich, 2019), and what stands around it in a decoder layer.

Products arrive as summands [S, N, rows], the parts of a product whose inner dimension was split: whoever
reads them adds them up, in order and in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `weight` has x's dtype.

    bfloat16 is normalised and scaled in float32 and rounded once.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def sum_summands(summands: Tensor) -> Tensor:
    """summands [S, N, rows] added in order 0, 1, ...  # [N, rows] float32, or float64 for float64"""
    work = accumulation_dtype(summands.dtype)
    total = summands[0].to(work)
    for part in summands[1:]:
        total = total + part.to(work)
    return total


def add_norm(
    residual: Tensor | None, summands: Tensor, weight: Tensor, eps: float, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add summands [S, N, hidden] to residual [N, hidden] (None: zeros) and normalise the rounded sum.

    Both results [N, hidden], the new residual and its norm, have the dtype of `weight` [hidden]. Where not
    `valid` [N] the summands count as 0, whatever they hold.
    """
    total = sum_summands(summands)
    if valid is not None:
        total = torch.where(valid.unsqueeze(-1), total, 0)
    if residual is not None:
        total = residual.to(total.dtype) + total
    total = total.to(weight.dtype)
    return total, rms_norm(total, weight, eps)


def join_norms(embedding: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eps: float) -> Tensor:
    """The norms of embedding and hidden [N, size], side by side: what eh_proj reads.  # [N, 2 * size]"""
    return torch.cat((rms_norm(embedding, enorm, eps), rms_norm(hidden, hnorm, eps)), -1)


def silu_and_mul_summands(summands: Tensor) -> Tensor:
    """silu of the first half of the summed [S, N, 2I] times the second half.  # [N, I], the summands' dtype

    A kernel gives bfloat16, whatever its summands are.
    """
    gate, up = sum_summands(summands).chunk(2, -1)
    return (F.silu(gate) * up).to(summands.dtype)
