"""Writes to the paged latent cache, one launch each; the twins in kernels/ref/kv_cache.py define them.

A slot is page * page_size + offset within one layer. An entry that is not valid is left out, and whatever
its slot holds is never used as an address.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COMPACT_COLUMNS = 64  # columns of a latent that one program moves, for a whole path at once


def write_latents(cache_layer: Tensor, slots: Tensor, latents: Tensor, valid: Tensor | None = None) -> None:
    """Store latents [N, C] at slots [N] int64 of cache_layer [pages, page_size, C] where `valid` [N].

    Without `valid` all are. Valid slots are distinct. No host sync.
    """
    _check_cache(cache_layer)
    count, width = latents.shape
    assert cache_layer.shape[-1] == width, f"latents have {width} columns, the cache {cache_layer.shape[-1]}"
    assert cache_layer.dtype == latents.dtype, f"latents are {latents.dtype}, the cache {cache_layer.dtype}"
    assert slots.shape == (count,), f"slots must be [{count}], is {tuple(slots.shape)}"
    assert valid is None or valid.shape == (count,), f"valid must be [{count}]"
    assert latents.stride(1) == 1, "a latent's columns must be adjacent"
    if count == 0:
        return
    _write_latents_kernel[(count,)](
        cache_layer,
        slots.contiguous(),
        latents,
        None if valid is None else valid.contiguous(),
        cache_layer.stride(1),
        latents.stride(0),
        width,
        BLOCK=triton.next_power_of_2(width),
    )


def compact(cache: Tensor, source_slots: Tensor, target_slots: Tensor, valid: Tensor) -> None:
    """Copy source to target slots [B, W] where `valid`, in each layer of cache [L, pages, page_size, C].

    A row's sources and targets may overlap, for all its loads come before its stores; a row's targets must
    not be another row's sources. Valid targets are distinct. No host sync.
    """
    _check_cache(cache)
    rows, path = source_slots.shape
    assert target_slots.shape == valid.shape == (rows, path), f"targets and valid must be [{rows}, {path}]"
    if rows * path == 0 or cache.shape[0] == 0:
        return
    width = cache.shape[-1]
    grid = (rows, cache.shape[0], triton.cdiv(width, COMPACT_COLUMNS))
    _compact_kernel[grid](
        cache,
        source_slots.contiguous(),
        target_slots.contiguous(),
        valid.contiguous(),
        cache.stride(0),
        cache.stride(2),
        width,
        path,
        PATH_BLOCK=triton.next_power_of_2(path),
        COLUMNS=COMPACT_COLUMNS,
    )


def _check_cache(cache: Tensor) -> None:
    """[..., pages, page_size, C]: columns adjacent, and slots at one stride across pages."""
    assert cache.stride(-1) == 1, "a cache entry's columns must be adjacent"
    assert cache.stride(-3) == cache.shape[-2] * cache.stride(-2), "pages must follow each other"


@triton.jit
def _write_latents_kernel(  # type: ignore[no-untyped-def]
    cache_ptr, slots_ptr, latents_ptr, valid_ptr, slot_stride, latent_stride, width, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    keep = column < width
    if valid_ptr is not None:
        keep &= tl.load(valid_ptr + entry) != 0
    slot = tl.load(slots_ptr + entry)
    latent = tl.load(latents_ptr + entry * latent_stride + column, mask=keep, other=0.0)
    tl.store(cache_ptr + slot * slot_stride + column, latent, mask=keep)


@triton.jit
def _compact_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    source_ptr,
    target_ptr,
    valid_ptr,
    layer_stride,
    slot_stride,
    width,
    path,
    PATH_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer_ptr = cache_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, PATH_BLOCK)
    entry = row * path + step
    valid = tl.load(valid_ptr + entry, mask=step < path, other=0) != 0
    source = tl.load(source_ptr + entry, mask=valid, other=0)
    target = tl.load(target_ptr + entry, mask=valid, other=0)
    keep = valid[:, None] & (column < width)[None, :]  # [path, columns]
    latents = tl.load(layer_ptr + source[:, None] * slot_stride + column[None, :], mask=keep, other=0.0)
    # One warp may store to a slot that another warp has yet to load: a path like 0, 2, 5 overlaps itself.
    tl.debug_barrier()
    tl.store(layer_ptr + target[:, None] * slot_stride + column[None, :], latents, mask=keep)
