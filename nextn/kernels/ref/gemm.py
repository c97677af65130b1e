"""Linear layers over plain or block-scaled FP8 weights; activations keep their dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype

FP8 = torch.float8_e4m3fn
Block = tuple[int, int]


def scale_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Blocks of a [rows, columns] weight; the last block of a dimension may be short."""
    return -(-rows // block[0]), -(-columns // block[1])


def dequantize(weight: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """weight [..., rows, columns] times its block's scale [..., row blocks, column blocks], as `dtype`.

    The product is taken in float32, or in float64 for a float64 result. Scales multiply, whatever the
    checkpoint's name for them (`weight_scale_inv`).
    """
    rows, columns = weight.shape[-2:]
    work = accumulation_dtype(dtype)
    wide = scale.to(work).repeat_interleave(block[0], -2)[..., :rows, :]
    wide = wide.repeat_interleave(block[1], -1)[..., :columns]
    return weight.to(work).mul_(wide).to(dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    block: Block = (128, 128),
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [..., in] times weight [out, in] transposed; an FP8 weight comes with its scales.  # [..., out]

    The weight is dequantised to x's dtype. Products and sum are taken in `out_dtype` where it is given.
    """
    if scale is not None:
        weight = dequantize(weight, scale, block, x.dtype)
    if out_dtype is not None and out_dtype != x.dtype:
        return F.linear(x.to(out_dtype), weight.to(out_dtype))
    return F.linear(x, weight)


def linear_summands(x: Tensor, weight: Tensor, scale: Tensor | None, block: Block) -> Tensor:
    """`linear` as one summand, in x's dtype: kernels that split the sum return several.  # [1, ..., out]"""
    return linear(x, weight, scale, block)[None]
