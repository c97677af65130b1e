"""Counter-based Gumbel noise in one launch; the twin in kernels/ref/sampling.py defines it.

The random word is Philox4x32-10 (Salmon et al., SC 2011) keyed by the request's seed and counting (token
id, position, choice, 0), so a program needs no state and its neighbours' noise does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens a program; at V3's vocabulary one row fills a Hopper's 132 SMs


def gumbel_noise(seed: Tensor, position: Tensor, choice: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise, [N, vocab] of `dtype`, for seed, position and choice [N] int64.

    Equal to the twin's up to the rounding of two float64 logarithms. No host sync.
    """
    rows = seed.numel()
    for name, tensor in (("seed", seed), ("position", position), ("choice", choice)):
        assert tensor.shape == (rows,), f"{name} must be [{rows}], is {tuple(tensor.shape)}"
        assert tensor.dtype == torch.int64, f"{name} must be int64, is {tensor.dtype}"
    out = torch.empty(rows, vocab, dtype=dtype, device=seed.device)
    if out.numel():
        grid = (rows, triton.cdiv(vocab, BLOCK))
        _gumbel_kernel[grid](
            seed.contiguous(), position.contiguous(), choice.contiguous(), out, vocab, BLOCK=BLOCK
        )
    return out


@triton.jit
def _gumbel_kernel(seed_ptr, position_ptr, choice_ptr, out_ptr, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = (token * 0).to(tl.uint32)
    position = zero + tl.load(position_ptr + row).to(tl.uint32)
    choice = zero + tl.load(choice_ptr + row).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seed_ptr + row), token.to(tl.uint32), position, choice, zero)
    u = tl.minimum((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # 1 - u is exact in float64 (u has 33 bits), so log needs no log1p; in float32 small u would be lost.
    noise = -tl.log(-tl.log(1.0 - u))
    tl.store(out_ptr + row * vocab + token, noise.to(out_ptr.dtype.element_ty), mask=token < vocab)
