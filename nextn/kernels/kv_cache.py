"""Compaction of the paged latent cache in one launch; the twin in kernels/ref/kv_cache.py defines it.

A slot is page * page_size + offset within one layer. An entry that is not valid is left out, and whatever
its slot holds is never used as an address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import launch_options, wait_for_inputs

COMPACT_COLUMNS = 64  # columns of a latent that one program moves, for a whole path at once


def compact(cache: Tensor, source_slots: Tensor, target_slots: Tensor, valid: Tensor) -> None:
    """Copy source to target slots [B, W] where `valid`, in each layer of cache [L, pages, page_size, C].

    A row's sources and targets may overlap, for all its loads come before its stores; a row's targets must
    not be another row's sources. Valid targets are distinct. No host sync.
    """
    _check_cache(cache)
    rows, path = source_slots.shape
    assert target_slots.shape == valid.shape == (rows, path), f"targets and valid must be [{rows}, {path}]"
    assert source_slots.dtype == target_slots.dtype == torch.int64, "slots must be int64"
    assert valid.dtype == torch.bool, f"valid must be bool, is {valid.dtype}"
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
        **launch_options(),
    )


def _check_cache(cache: Tensor) -> None:
    """[..., pages, page_size, C]: columns adjacent, and slots at one stride across pages."""
    assert cache.stride(-1) == 1, "a cache entry's columns must be adjacent"
    assert cache.stride(-3) == cache.shape[-2] * cache.stride(-2), "pages must follow each other"


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
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
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
