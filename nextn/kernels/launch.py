"""How kernels are launched: with programmatic dependent launch where the device has it.

A kernel launched so may start while the one before it still drains, and must call `wait_for_inputs` before it
reads what that one wrote or overwrites what that one reads. On a chain of small kernels in a CUDA graph this
hides the launch gap (0.70 us a kernel becomes 0.56 us on an H200).
"""

from __future__ import annotations

import math
import os
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 90

DECODE_TOKENS = 64
"""Up to so many rows the order of every sum in products, router and experts is one and the same, so that a
token's results do not depend on its batch."""

LOG2_E = 1 / math.log(2)
"""Attention's exponentials and logarithms are base 2."""

EARLY = tl.constexpr(".cg")
"""Of loads before `wait_for_inputs`: from the L2, where an ended kernel's writes are."""

LEAST_DOT = 16
"""The least side of a tile that tl.dot takes."""


def dot_block(size: int) -> int:
    """The smallest power of two that holds `size` and that tl.dot takes as a side."""
    return max(LEAST_DOT, int(triton.next_power_of_2(size)))


@cache
def has_dependent_launch() -> bool:
    """Whether kernels compile for an NVIDIA GPU of Hopper's generation or later."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= HOPPER)


@cache
def is_hopper() -> bool:
    """Whether kernels compile for Hopper itself, whose wgmma no other generation has."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch == HOPPER)


def launch_options() -> dict[str, bool]:
    """Keyword arguments of every launch: the constexpr PDL and, where it is true, Triton's own option."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch() else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for every earlier kernel's writes, and let the next kernel's programs take free places.

    Every program calls this, even one without work, and in this order: the device's wait is for the whole
    kernel before, its end and its writes' being visible included. So when a kernel starts, all kernels but
    the one launched just before it have ended, and what those wrote may be read before this wait, with
    `cache_modifier=EARLY`, for the L1 may hold older values. What this kernel writes is visible to the next
    behind the next one's own wait alone, however early that one starts.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_alone(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `wait_for_inputs`, but the next kernel starts when this one has ended: it may read results early."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Ask the L2 for the sector (32 bytes) that each pointer lies in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sectors(COLUMNS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a row of COLUMNS items (a power of two) of so many bits, the first item of each sector."""
    SECTOR: tl.constexpr = 256 // BITS
    COUNT: tl.constexpr = COLUMNS // SECTOR if COLUMNS > SECTOR else 1
    return tl.arange(0, COUNT) * SECTOR
