"""Tree attention's partial results by roles: a warp fetches by TMA, one warp group scores, two multiply.

What `attention._attention_kernel` does, for Hopper and caches that TMA can read. There all warps do
everything in turn, so that a block's loads wait for its arithmetic and its arithmetic for its loads: 3.7 us
a block of 64 entries on an H200. Here the fetching warp keeps both buffers of a block full. The first warp
group computes a block's scores and weights and multiplies these with the first half of the values' columns;
the second group multiplies them with the other half. Gluon, Triton's lower level, has no interpreter: on a
CPU the other kernel stands in, and GPU tests hold both against the same twin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nextn.kernels.launch import EARLY, launch_options, wait_for_inputs

ROWS = 64
"""(node, head) pairs of a tile, and entries of a block: one wgmma's height."""
BLOCK = gl.constexpr(ROWS)
STAGES = gl.constexpr(2)
WARP = gl.constexpr(32)
SWIZZLE = 128
"""Bytes of a row that a TMA box and wgmma's operands are swizzled over."""


def fits(cache_layer: Tensor, tail: Tensor, kv_lora: int) -> bool:
    """Whether TMA can fetch these entries: pages of whole blocks, powers of two of columns, one row pitch."""
    pages, page_size, width = cache_layer.shape
    rope = width - kv_lora
    return (
        page_size % ROWS == 0
        and pages * page_size < 2**31
        and kv_lora in (256, 512)
        and rope == ROWS
        and tail.stride(0) % tail.stride(1) == 0
        and tail.stride(1) % 8 == 0
        and tail.data_ptr() % 16 == 0
    )


def launch(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    tail: Tensor,
    mask: Tensor,
    bounds: Tensor,
    partial: Tensor,
    log_sums: Tensor,
    scale: float,
) -> None:
    """Fill partial [tiles, slots, 64, kv_lora] and log_sums [tiles, slots, 64] as `_attention_kernel` does.

    The other arguments are `decode_attention`'s; `scale` is in base 2, and bounds [B + 1] are of a plan
    in blocks of 64. Tensors of which `fits` is false are read wrongly.
    """
    tiles, slots, _, kv_lora = partial.shape
    rows, nodes = mask.shape
    heads, width = q.shape[1:]
    half, rope = kv_lora // 2, width - kv_lora
    pitch = tail.stride(0) // tail.stride(1)
    entries = tail.as_strided(((rows - 1) * pitch + tail.shape[1], width), (tail.stride(1), 1))
    sources = []
    for source in (q.view(-1, width), cache_layer.view(-1, width), entries):
        for columns in (half, rope):
            layout = gl.NVMMASharedLayout(SWIZZLE, 16, 2)
            sources.append(TensorDescriptor.from_tensor(source, [ROWS, columns], layout))
    _hopper_attention_kernel[(tiles, slots - rows + 1)](
        *sources,
        page_table,
        prefix_lens,
        mask,
        bounds,
        partial,
        log_sums,
        scale,
        page_table.stride(0),
        pitch,
        rows,
        nodes,
        heads,
        tail.shape[1],
        slots,
        HALF=half,
        ROPE=rope,
        PAGE_SIZE=cache_layer.shape[1],
        num_warps=4,
        maxnreg=168,  # of 12 warps' 65536 registers; the roles then divide them anew
        **launch_options(),
    )


@triton.jit
def _meet():  # type: ignore[no-untyped-def]
    """A barrier of a role's warps, by the name that every release of Triton knows."""
    tl.debug_barrier()


@gluon.jit
def _blocks_of(lists, row, program, run, known):  # type: ignore[no-untyped-def]
    """A row's prefix length, and which of its blocks a program computes.

    `known`: a row with its bounds, prefix length and first page, so that the first one costs no round trip
    to memory.
    """
    lens_ptr, bounds_ptr = lists
    known_row, begin, end, prefix, _ = known
    if row != known_row:
        begin = gl.load(bounds_ptr + row, cache_modifier=EARLY)
        end = gl.load(bounds_ptr + row + 1, cache_modifier=EARLY)
        prefix = gl.load(lens_ptr + row, cache_modifier=EARLY).to(gl.int32)
    first = gl.maximum(program * run - begin, 0)
    last = gl.minimum(program * run + run, end) - begin
    return prefix, first, last


@gluon.jit
def _place_of(block, prefix, prefix_blocks, tail_len):  # type: ignore[no-untyped-def]
    """Whether a row's block lies in the tail, its first entry there or in the prefix, and how many follow."""
    in_tail = block >= prefix_blocks
    begin = gl.where(in_tail, block - prefix_blocks, block) * BLOCK
    return in_tail, begin, gl.where(in_tail, tail_len, prefix) - begin


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    sources,
    lists,
    work,
    table,
    parts,
    full,
    free,
    PAGE_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The fetching warp: every block of every row, as soon as its buffer is free.

    Prefixes were written by earlier steps, so their blocks do not wait for the kernel before this one.
    """
    cache, cache_rope, tail, tail_rope = sources
    program, run, first_row, last_row, known = work
    table_ptr, table_stride, pitch = table
    low, high, rope = parts
    full_low, full_high = full
    free_low, free_high = free
    HALF: gl.constexpr = low.shape[2]
    turn = 0
    for row in range(first_row, last_row + 1):
        prefix, first, last = _blocks_of(lists, row, program, run, known)
        prefix_blocks = gl.cdiv(prefix, BLOCK)
        row_table_ptr = table_ptr + row * table_stride
        page = known[4]
        if row != known[0]:
            there = first < prefix_blocks
            page_ptr = row_table_ptr + first * BLOCK // PAGE_SIZE
            page = gl.load(page_ptr, mask=there, other=0, cache_modifier=EARLY)
        for block in range(first, last):
            stage = turn % STAGES
            phase = (turn // STAGES) & 1
            turn += 1
            in_tail = block >= prefix_blocks
            slot = page.to(gl.int32) * PAGE_SIZE + block * BLOCK % PAGE_SIZE
            place = row * pitch + (block - prefix_blocks) * BLOCK
            # Asked for before the wait, so that the next block does not wait for its address.
            follows = block + 1 < prefix_blocks
            next_ptr = row_table_ptr + (block + 1) * BLOCK // PAGE_SIZE
            page = gl.load(next_ptr, mask=follows, other=0, cache_modifier=EARLY)
            low_bar, high_bar = full_low.index(stage), full_high.index(stage)
            mbarrier.wait(free_low.index(stage), phase ^ 1)
            mbarrier.expect(low_bar, cache.block_type.nbytes + cache_rope.block_type.nbytes)
            if in_tail:
                wait_for_inputs(PDL)
                tma.async_copy_global_to_shared(tail, [place, 0], low_bar, low.index(stage))
                tma.async_copy_global_to_shared(tail_rope, [place, 2 * HALF], low_bar, rope.index(stage))
            else:
                tma.async_copy_global_to_shared(cache, [slot, 0], low_bar, low.index(stage))
                tma.async_copy_global_to_shared(cache_rope, [slot, 2 * HALF], low_bar, rope.index(stage))
            mbarrier.wait(free_high.index(stage), phase ^ 1)
            mbarrier.expect(high_bar, cache.block_type.nbytes)
            if in_tail:
                tma.async_copy_global_to_shared(tail, [place, HALF], high_bar, high.index(stage))
            else:
                tma.async_copy_global_to_shared(cache, [slot, HALF], high_bar, high.index(stage))


@gluon.jit
def _clear_after(buffer, count):  # type: ignore[no-untyped-def]
    """Make a block's entries from `count` on zero: they may be NaN, and zero weights would not hide that."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keep = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None] < count
    COLUMNS: gl.constexpr = buffer.shape[1]
    for column in gl.static_range(0, COLUMNS, 64):
        part = buffer.slice(column, 64, dim=1)
        value = part.load(LAYOUT)
        part.store(gl.where(keep, value, gl.zeros_like(value)))
    fence_async_shared()


@gluon.jit
def _score(  # type: ignore[no-untyped-def]
    sources,
    lists,
    work,
    sizes,
    mask_ptr,
    results,
    parts,
    query,
    full,
    free,
    weights_buffer,
    factors,
    ready,
    taken,
    query_bar,
    PDL: gl.constexpr,
):
    """The first warp group: scores and weights of each block, and the products with the low columns."""
    queries, queries_rope = sources
    program, run, first_row, last_row, known = work
    tile, scale, nodes, heads, tail_len, slots = sizes
    partial_ptr, log_sums_ptr = results
    low, high, rope = parts
    query_low, query_high, query_rope = query
    full_low, full_high = full
    HALF: gl.constexpr = low.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    pairs = nodes * heads
    local = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    keep = tile * BLOCK + local < pairs
    key = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    turn, handed = 0, 0
    wait_for_inputs(PDL)  # of all roles this one alone reads what the kernel before wrote, and goes first
    for row in range(first_row, last_row + 1):
        prefix, first, last = _blocks_of(lists, row, program, run, known)
        prefix_blocks = gl.cdiv(prefix, BLOCK)
        # The row before's results have left the queries' memory.
        mbarrier.wait(taken, (handed & 1) ^ 1)
        _meet()
        place = row * pairs + tile * BLOCK
        mbarrier.expect(query_bar, 2 * queries.block_type.nbytes + queries_rope.block_type.nbytes)
        tma.async_copy_global_to_shared(queries, [place, 0], query_bar, query_low)
        tma.async_copy_global_to_shared(queries_rope, [place, 2 * HALF], query_bar, query_rope)
        tma.async_copy_global_to_shared(queries, [place, HALF], query_bar, query_high)
        seen = gl.load(mask_ptr + row * nodes + (tile * BLOCK + local) // heads, mask=keep, other=-1)
        peak = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        norm = gl.full([BLOCK], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        values = gl.full([BLOCK, HALF], 0.0, gl.float32, VALUES)
        mbarrier.wait(query_bar, (row - first_row) & 1)
        for block in range(first, last):
            stage = turn % STAGES
            phase = (turn // STAGES) & 1
            mbarrier.wait(full_low.index(stage), phase)
            scores = gl.full([BLOCK, BLOCK], 0.0, gl.float32, SCORES)
            keys = low.index(stage).permute((1, 0))
            scores = warpgroup_mma(query_low, keys, scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(query_rope, rope.index(stage).permute((1, 0)), scores, is_async=True)
            mbarrier.wait(full_high.index(stage), phase)
            keys = high.index(stage).permute((1, 0))
            scores = warpgroup_mma(query_high, keys, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            in_tail, begin, count = _place_of(block, prefix, prefix_blocks, tail_len)
            if in_tail or count < BLOCK:
                word = gl.where(in_tail, seen >> begin, -1)
                visible = (key < count)[None, :] & (((word[:, None] >> key.to(gl.int64)[None, :]) & 1) != 0)
                scores = gl.where(visible, scores, float("-inf"))
                _clear_after(low.index(stage), count)
            new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
            base = gl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: all weights 0
            exact = gl.exp2(scores * scale - base[:, None])
            shrink = gl.exp2(peak - base)
            norm = norm * shrink + gl.sum(exact, 1)
            peak = new_peak
            weights = exact.to(gl.bfloat16)
            mbarrier.wait(taken, (handed & 1) ^ 1)
            handed += 1
            weights_buffer.store(weights)
            factors.store(shrink)
            fence_async_shared()
            mbarrier.arrive(ready, count=1)
            values = values * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))[:, None]
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, VALUES, 2))
            values = warpgroup_mma(operand, low.index(stage), values, is_async=True)
            values = warpgroup_mma_wait(0, deps=[values])
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        some = norm != 0.0  # a NaN stays one
        inverse = 1.0 / gl.where(some, norm, 1.0)
        mbarrier.wait(taken, (handed & 1) ^ 1)
        handed += 1
        factors.store(inverse)
        mbarrier.arrive(ready, count=1)
        slot = (tile * slots + program + row).to(gl.int64)
        log_sum = gl.where(some, peak + gl.log2(gl.where(some, norm, 1.0)), float("-inf"))
        gl.store(log_sums_ptr + slot * BLOCK + local, log_sum, mask=keep)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, VALUES))
        _store_half(partial_ptr, slot, values, inverse, query_low, tile, pairs, 0)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    lists,
    work,
    sizes,
    partial_ptr,
    high,
    query_high,
    full_high,
    free_high,
    weights_buffer,
    factors,
    ready,
    taken,
):
    """The second warp group: the products of each block's weights with the high columns."""
    program, run, first_row, last_row, known = work
    tile, nodes, heads, tail_len, slots = sizes
    HALF: gl.constexpr = high.shape[2]
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turn, handed = 0, 0
    for row in range(first_row, last_row + 1):
        prefix, first, last = _blocks_of(lists, row, program, run, known)
        prefix_blocks = gl.cdiv(prefix, BLOCK)
        values = gl.full([BLOCK, HALF], 0.0, gl.float32, VALUES)
        for block in range(first, last):
            stage = turn % STAGES
            mbarrier.wait(full_high.index(stage), (turn // STAGES) & 1)
            turn += 1
            mbarrier.wait(ready, handed & 1)
            handed += 1
            _, _, count = _place_of(block, prefix, prefix_blocks, tail_len)
            if count < BLOCK:
                _clear_after(high.index(stage), count)
            shrink = factors.load(gl.SliceLayout(1, VALUES))
            values = values * shrink[:, None]
            values = warpgroup_mma(weights_buffer, high.index(stage), values, is_async=True)
            values = warpgroup_mma_wait(0, deps=[values])
            mbarrier.arrive(free_high.index(stage), count=1)
            mbarrier.arrive(taken, count=1)
        mbarrier.wait(ready, handed & 1)
        handed += 1
        inverse = factors.load(gl.SliceLayout(1, VALUES))
        slot = (tile * slots + program + row).to(gl.int64)
        _store_half(partial_ptr, slot, values, inverse, query_high, tile, nodes * heads, HALF)
        mbarrier.arrive(taken, count=1)


@gluon.jit
def _store_half(partial_ptr, slot, values, inverse, buffer, tile, pairs, begin):  # type: ignore[no-untyped-def]
    """Write a tile's values of half the columns, from column `begin` on, over the softmax's sum.

    They pass through `buffer`, where the row's queries were: their registers' order would scatter the stores,
    which took 4 us a tile.
    """
    HALF: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    buffer.store((values * inverse[:, None]).to(gl.bfloat16))
    result = buffer.load(LAYOUT)
    fence_async_shared()
    local = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    column = begin + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    target_ptr = partial_ptr + slot * (BLOCK * 2 * HALF) + (local * (2 * HALF) + column)
    gl.store(target_ptr, result, mask=tile * BLOCK + local < pairs)


@gluon.jit(do_not_specialize=["rows", "nodes"])
def _hopper_attention_kernel(  # type: ignore[no-untyped-def]
    queries,
    queries_rope,
    cache,
    cache_rope,
    tail,
    tail_rope,
    table_ptr,
    lens_ptr,
    mask_ptr,
    bounds_ptr,
    partial_ptr,
    log_sums_ptr,
    scale,
    table_stride,
    pitch,
    rows,
    nodes,
    heads,
    tail_len,
    slots,
    HALF: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    ENTRIES: gl.constexpr = queries.layout
    low = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, HALF], ENTRIES)
    high = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, HALF], ENTRIES)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, ROPE], ENTRIES)
    query_low = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, HALF], ENTRIES)
    query_high = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, HALF], ENTRIES)
    query_rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, ROPE], ENTRIES)
    weights_buffer = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], ENTRIES)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_low = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_high = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_low = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_high = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    single = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_low.index(stage), count=1)
        mbarrier.init(full_high.index(stage), count=1)
        mbarrier.init(free_low.index(stage), count=1)
        mbarrier.init(free_high.index(stage), count=1)
    for number in gl.static_range(3):
        mbarrier.init(single.index(number), count=1)
    ready, taken, query_bar = single.index(0), single.index(1), single.index(2)
    fence_async_shared()

    # The plan, the page table and the prefixes are older than the kernel before this one.
    tile, program, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    # Every warp holds all of the numbers, so that the sums need no shared memory. The first rows' are asked
    # for together with the total: the first entry waits for both.
    LANES: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    lane = gl.arange(0, WARP, LANES)
    total = gl.load(bounds_ptr + rows, cache_modifier=EARLY)
    ends = gl.load(bounds_ptr + 1 + lane, mask=lane < rows, other=2147483647, cache_modifier=EARLY)
    prefixes = gl.load(lens_ptr + lane, mask=lane < rows, other=0, cache_modifier=EARLY).to(gl.int32)
    run = gl.cdiv(total, splits)
    begin = program * run
    stop = gl.minimum(begin + run, total)
    first_row = gl.sum((ends <= begin).to(gl.int32), 0)
    last_row = gl.sum((ends < stop).to(gl.int32), 0)
    row_begin = gl.max(gl.where(ends <= begin, ends, 0), 0)
    prefix = gl.sum(gl.where(lane == first_row, prefixes, 0), 0)
    in_prefix = (first_row < rows) & (first_row < WARP) & ((begin - row_begin) * BLOCK < prefix)
    page_ptr = table_ptr + first_row * table_stride + (begin - row_begin) * BLOCK // PAGE_SIZE
    known = (
        gl.where(first_row < WARP, first_row, -1),
        row_begin,
        gl.min(gl.where(ends > begin, ends, 2147483647), 0),
        prefix,
        gl.load(page_ptr, mask=in_prefix, other=0, cache_modifier=EARLY),
    )
    for offset in range(32, rows, 32):
        there = offset + lane < rows
        ends = gl.load(bounds_ptr + 1 + offset + lane, mask=there, other=2147483647, cache_modifier=EARLY)
        first_row += gl.sum((ends <= begin).to(gl.int32), 0)
        last_row += gl.sum((ends < stop).to(gl.int32), 0)
    last_row = gl.where(begin < stop, last_row, first_row - 1)  # a program without blocks has no rows
    work = (program, run, first_row, last_row, known)
    gl.warp_specialize(
        [
            (
                _score,
                (
                    (queries, queries_rope),
                    (lens_ptr, bounds_ptr),
                    work,
                    (tile, scale, nodes, heads, tail_len, slots),
                    mask_ptr,
                    (partial_ptr, log_sums_ptr),
                    (low, high, rope),
                    (query_low, query_high, query_rope),
                    (full_low, full_high),
                    free_low,
                    weights_buffer,
                    factors,
                    ready,
                    taken,
                    query_bar,
                    PDL,
                ),
            ),
            (
                _multiply,
                (
                    (lens_ptr, bounds_ptr),
                    work,
                    (tile, nodes, heads, tail_len, slots),
                    partial_ptr,
                    high,
                    query_high,
                    full_high,
                    free_high,
                    weights_buffer,
                    factors,
                    ready,
                    taken,
                ),
            ),
            (
                _fetch,
                (
                    (cache, cache_rope, tail, tail_rope),
                    (lens_ptr, bounds_ptr),
                    work,
                    (table_ptr, table_stride, pitch),
                    (low, high, rope),
                    (full_low, full_high),
                    (free_low, free_high),
                    PAGE_SIZE,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [208, 56],
    )
