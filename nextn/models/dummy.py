"""Random weights: what a module needs to be timed or tested without a checkpoint.

The values keep a network alive rather than imitate training: a linear layer maps inputs of unit variance to
outputs of unit variance, but for those that write to the residual stream; norms are ones, and routers see
scores of unit variance, so tokens spread over all experts. Speed is that of the device's memory: FP8 weights
are drawn as random bytes, never as floats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from nextn.kernels.ref.gemm import Block, scale_shape
from nextn.models.loader import is_block_aligned, shard_range
from nextn.models.specs import TensorSpec

BIAS_STD = 0.01
"""Spread of the router's correction bias: not zero, and small beside the sigmoid scores' own spread."""

RESIDUAL_SCALE = 1e-3
"""What attention and feed-forward add to the residual stream, relative to the embedding in it.

Small, so that a token's experts depend on the token and little on what stands before it: rows that repeat
one token then share experts.
"""


def fill_dummy(
    specs: Iterable[TensorSpec],
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    keep_fp8: bool,
    block_size: Block = (128, 128),
) -> None:
    """Load random values into every spec's rank part, drawn on `device`.

    With `keep_fp8` 'linear' tensors arrive as FP8 with scales, all others (and, without it, all) as `dtype`.
    One tensor is alive at a time beside the module's own storage: the peak is the model's size and about
    three times its largest tensor. V3's 58 layers with experts have 768 expert tensors each, some 45,000 of
    14.7 MB: about eight launches each, so seconds for a card full of weights. Values depend on the seed, the
    tensor's name and the place of the rank's part, not on order: a tensor that all ranks hold is the same on
    all of them.
    """
    generator = torch.Generator(device)
    code_rms = rms_of_codes()
    for spec in specs:
        ranges = [shard_range(part, size) for part, size in zip(spec.shard, spec.shape, strict=True)]
        generator.manual_seed(tensor_seed(seed, spec.name, tuple(start for start, _ in ranges)))
        shape = tuple(stop - start for start, stop in ranges)
        if keep_fp8 and spec.kind == "linear" and is_block_aligned(spec, block_size):
            spec.load(*random_fp8(shape, weight_std(spec) / code_rms, generator, block_size))
        elif spec.kind == "norm":
            spec.load(torch.ones(shape, dtype=dtype, device=device), None)
        else:
            stored = torch.float32 if spec.kind == "bias" and dtype == torch.bfloat16 else dtype
            values = torch.empty(shape, dtype=stored, device=device)
            spec.load(values.normal_(0.0, weight_std(spec), generator=generator), None)


def tensor_seed(seed: int, name: str, start: tuple[int, ...] = ()) -> int:
    """Seed of one tensor: a CRC-32 of the run's seed, the tensor's name and the start of the part."""
    return zlib.crc32(f"{seed}:{name}:{start}".encode())


def weight_std(spec: TensorSpec) -> float:
    """Standard deviation of a spec's values: 1/sqrt(in_features), for the embedding 1, for the bias 0.01."""
    if spec.kind == "bias":
        return BIAS_STD
    if spec.name.endswith("embed_tokens.weight"):
        return 1.0
    adds = spec.name.endswith(("o_proj.weight", "down_proj.weight"))
    return float(spec.shape[-1] ** -0.5) * (RESIDUAL_SCALE if adds else 1.0)


def random_fp8(
    shape: tuple[int, ...], scale: float, generator: torch.Generator, block_size: Block
) -> tuple[Tensor, Tensor]:
    """Uniform FP8 codes without the two NaNs (0x7F, 0xFF), and the same scale for every block.

    Returns the weight [N, K] in float8_e4m3fn and its scales [ceil(N / bn), ceil(K / bk)] in float32.
    """
    device = generator.device
    codes = torch.randint(0, 254, shape, dtype=torch.uint8, device=device, generator=generator)
    codes += codes >= 0x7F  # 0..126 and 128..254: neither NaN code can occur
    blocks = scale_shape(shape[0], shape[1], block_size)
    return codes.view(torch.float8_e4m3fn), torch.full(blocks, scale, dtype=torch.float32, device=device)


def rms_of_codes() -> float:
    """Root mean square of e4m3 values when every code but the NaNs is equally likely."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return math.sqrt(float(codes.square().mean()))
