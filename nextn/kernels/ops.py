"""Where each op runs: the Triton kernel for CUDA tensors, its plain-torch twin elsewhere.

Triton is imported at the first CUDA call, so a CPU installation does without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextn.kernels.ref import kv_cache as ref_kv_cache
from nextn.kernels.ref import sampling as ref_sampling


def gumbel_noise(seed: Tensor, position: Tensor, choice: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [N, vocab], a function of seed, position, choice [N] int64 and the token id."""
    if seed.is_cuda:
        from nextn.kernels.noise import gumbel_noise as kernel

        return kernel(seed, position, choice, vocab, dtype)
    return ref_sampling.gumbel_noise(seed, position, choice, vocab, dtype)


def write_latents(cache_layer: Tensor, slots: Tensor, latents: Tensor, valid: Tensor | None = None) -> None:
    """Store latents [N, C] at slots [N] of cache_layer [pages, page_size, C] where `valid` [N], or all."""
    if cache_layer.is_cuda:
        from nextn.kernels.kv_cache import write_latents as kernel

        return kernel(cache_layer, slots, latents, valid)
    return ref_kv_cache.write_latents(cache_layer, slots, latents, valid)


def compact(cache: Tensor, source_slots: Tensor, target_slots: Tensor, valid: Tensor) -> None:
    """Copy source to target slots [B, W] where `valid`, in each layer of cache [L, pages, page_size, C]."""
    if cache.is_cuda:
        from nextn.kernels.kv_cache import compact as kernel

        return kernel(cache, source_slots, target_slots, valid)
    return ref_kv_cache.compact(cache, source_slots, target_slots, valid)
