"""Writes to the paged latent cache: new latents to their slots, and accepted ones to the front.

A slot is page * page_size + offset within one layer. Nothing here depends on data for its shapes, so that a
step can be captured: an invalid entry repeats a valid one (the same value to the same slot) instead of being
left out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_latents(cache_layer: Tensor, slots: Tensor, latents: Tensor, valid: Tensor | None = None) -> None:
    """Store latents [N, C] at slots [N] of cache_layer [pages, page_size, C], but those not `valid` [N].

    Valid slots are distinct; the slots of invalid entries may hold anything.
    """
    flat = cache_layer.view(-1, cache_layer.shape[-1])
    if valid is not None and valid.shape[0]:
        source, some = _first_valid(valid)
        slots = slots[source].clamp(0, flat.shape[0] - 1)
        latents = torch.where(some, latents[source], flat[slots])
    flat.index_copy_(0, slots, latents)


def compact(cache: Tensor, source_slots: Tensor, target_slots: Tensor, valid: Tensor) -> None:
    """Copy source slots [B, W] to target slots [B, W] where `valid`, in each layer.

    cache: [L, pages, page_size, C]. All loads come before all stores, so sources and targets may overlap.
    Valid targets are distinct; the slots of invalid entries may hold anything.
    """
    if not valid.numel():
        return
    flat = cache.view(cache.shape[0], -1, cache.shape[-1])
    source, some = _first_valid(valid.flatten())
    targets = target_slots.flatten()[source].clamp(0, flat.shape[1] - 1)
    # Without a valid entry every target is copied onto itself.
    sources = torch.where(some, source_slots.flatten()[source], targets)
    flat.index_copy_(1, targets, flat.index_select(1, sources))


def _first_valid(valid: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry of valid [N] itself if valid, else the first valid one; and whether there is any."""
    first = valid.int().argmax()
    return torch.where(valid, torch.arange(valid.shape[0], device=valid.device), first), valid.any()
