"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `weight` has x's dtype.

    bfloat16 is normalised and scaled in float32 and rounded once.
    """
    return F.rms_norm(x, weight.shape, weight, eps)
