"""Tree attention over the paged latent cache: split over the context, merged, and up-projected by w_uv.

The blocks of all rows' contexts form one list, and each program takes a run of it whatever rows it crosses,
so a long row next to short ones keeps every SM busy. A tile holds (node, head) pairs: one read of an entry
serves the scores and, in its first kv_lora columns, the values of 64 of them. Where a row is cut depends on
the other rows' lengths, so its rounding depends on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import (
    EARLY,
    LOG2_E,
    dot_block,
    is_hopper,
    launch_options,
    wait_alone,
    wait_for_inputs,
)
from nextn.kernels.ref.attention import MAX_TREE_NODES

WARP = tl.constexpr(32)
ROLES_TRITON = "3.6."
"""The Triton with which `attention_hopper` has run; Gluon still changes. 3.7 and 3.8 compile it."""
INTERPRETED_SPLITS = 4  # programs where there are no SMs to fill


class AttentionConfig(NamedTuple):
    """How one call is cut up; every field follows from shapes and the number of SMs."""

    block_kv: int  # entries of a block; the plan counts in it
    block_rows: int  # (node, head) pairs of a tile
    warps: int
    stages: int
    splits: int  # programs a tile
    fused: bool  # merge and project up in one launch, where (node, head) pairs are few
    merge_slots: int  # partial results that a program of the merge holds at once
    merge_warps: int
    up_nodes: int  # nodes and values of a head that a program projects up; both at least 16
    up_values: int
    up_warps: int
    roles: bool  # by the kernel of `attention_hopper` where it can run, whose tiles and blocks are of 64


class AttentionPlan(NamedTuple):
    """What the layers of one forward share: where each row's blocks begin in the list of all blocks."""

    bounds: Tensor  # [B + 1] int32
    tail_len: int
    block_kv: int


def choose_config(
    rows: int, nodes: int, heads: int, value_dim: int, processors: int, block_kv: int = 64
) -> AttentionConfig:
    """The configuration for `rows` of `nodes` with `heads` heads on a device of `processors` SMs."""
    block_rows = 64
    tiles = triton.cdiv(nodes * heads, block_rows)
    # A fused merge is repeated for each share of a pair's values: few pairs leave the SMs for that.
    fused = 2 * rows * nodes * heads <= processors
    values = 64 if fused else 32
    return AttentionConfig(
        block_kv=block_kv,
        block_rows=block_rows,
        warps=8,
        stages=2,
        splits=max(1, processors // tiles),
        fused=fused,
        merge_slots=32 if fused else 16,
        merge_warps=4 if fused else 2,
        up_nodes=min(32, dot_block(rows * nodes)),
        up_values=min(values, dot_block(value_dim)),
        up_warps=4,
        roles=True,
    )


def default_block(page_size: int) -> int:
    """Entries of a block: with 64 of them two blocks and a tile's queries just fit the shared memory.

    Where a block's entries lie on several pages their addresses need registers, and 32 avoid spills.
    """
    return 64 if page_size % 64 == 0 else 32


def processors_of(device: torch.device) -> int:
    """SMs of a device; on a CPU a few programs, for they run one after the other."""
    if device.type != "cuda":
        return INTERPRETED_SPLITS
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_attention(
    prefix_lens: Tensor, tail_len: int, *, page_size: int = 64, block_kv: int | None = None
) -> AttentionPlan:
    """Cut prefix_lens [B] int64 and a tail of `tail_len` entries into blocks, once a forward. No host sync.

    `page_size` is the cache's; `block_kv` overrides the number of entries of a block.
    """
    assert prefix_lens.dim() == 1, "prefix_lens must be [B]"
    assert 0 < tail_len <= MAX_TREE_NODES, f"a tail has 1 to {MAX_TREE_NODES} entries, not {tail_len}"
    rows, block = prefix_lens.shape[0], block_kv or default_block(page_size)
    bounds = torch.empty(rows + 1, dtype=torch.int32, device=prefix_lens.device)
    _plan_kernel[(1,)](
        prefix_lens.contiguous(),
        bounds,
        rows,
        triton.cdiv(tail_len, block),
        BLOCK_KV=block,
        ROWS=triton.next_power_of_2(rows),
        num_warps=1,
        **launch_options(),
    )
    return AttentionPlan(bounds, tail_len, block)


def decode_attention(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    tail: Tensor,
    mask: Tensor,
    scale: float,
    w_uv: Tensor,
    *,
    plan: AttentionPlan,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Absorbed attention of q [B * M, H, C] to prefix and tail, up-projected by w_uv.  # [B * M, H * v]

    cache_layer [pages, page_size, C], page_table [B, P] int64, prefix_lens [B] int64, tail [B, E, C], mask
    [B, M] int64 with at least one bit below E a node, w_uv [H, v, kv_lora]; C = kv_lora + rope. All values
    are bf16. Cache entries beyond a prefix may hold NaN, the tail's must be finite. `plan` is what
    `plan_attention` returned for the same prefix_lens and E. No host sync. What the plan was made of, the
    page table, the masks and the entries of prefixes are read before the kernel launched just before has
    ended, so that one must not write them.
    """
    rows, nodes, heads = _check(q, cache_layer, page_table, prefix_lens, tail, mask, w_uv, plan)
    assert scale > 0, "scores are scaled after their maximum is taken, so scale must be positive"
    value_dim, kv_lora = w_uv.shape[1:]
    if config is None:
        processors = processors_of(q.device)
        config = choose_config(rows, nodes, heads, value_dim, processors, plan.block_kv)
    assert config.block_kv == plan.block_kv, f"plan of blocks of {plan.block_kv}, call of {config.block_kv}"
    tiles = triton.cdiv(nodes * heads, config.block_rows)
    # A program that ends in a row's middle shares it with the next, so program + row is a slot of its own.
    slots = config.splits + rows - 1
    partial = q.new_empty(tiles, slots, config.block_rows, kv_lora)
    log_sums = q.new_empty(tiles, slots, config.block_rows, dtype=torch.float32)
    inputs = (q, cache_layer, page_table, prefix_lens, tail, mask, plan.bounds)
    results = (partial, log_sums)
    if _by_roles(config, cache_layer, tail, kv_lora):
        from nextn.kernels import attention_hopper

        attention_hopper.launch(*inputs, *results, scale * LOG2_E)
    else:
        _launch(inputs, results, scale * LOG2_E, config)
    return _merge(partial, log_sums, w_uv, plan, config, (rows, nodes, heads))


def runs_by_roles() -> bool:
    """Whether this device and this Triton can run the kernel of `attention_hopper`."""
    return is_hopper() and triton.__version__.startswith(ROLES_TRITON)


def _by_roles(config: AttentionConfig, cache_layer: Tensor, tail: Tensor, kv_lora: int) -> bool:
    """Whether the kernel of `attention_hopper` is wanted and can run here."""
    if not (config.roles and config.block_kv == config.block_rows == 64 and runs_by_roles()):
        return False
    from nextn.kernels import attention_hopper  # not at the top: other devices' Triton may not have its parts

    return attention_hopper.fits(cache_layer, tail, kv_lora)


def _launch(
    inputs: tuple[Tensor, ...], results: tuple[Tensor, Tensor], scale: float, config: AttentionConfig
) -> None:
    """Fill the partial `results` with this file's kernel, which takes any device, page size and latent."""
    q, cache_layer, page_table, _, tail, mask, _ = inputs
    tiles, slots, block_rows, kv_lora = results[0].shape
    rope = q.shape[2] - kv_lora
    _attention_kernel[(tiles, config.splits)](
        *inputs,
        *results,
        scale,
        page_table.stride(0),
        tail.stride(0),
        tail.stride(1),
        *mask.shape,
        q.shape[1],
        tail.shape[1],
        slots,
        KV_LORA=kv_lora,
        LATENT=dot_block(kv_lora),
        ROPE=rope,
        ROPE_BLOCK=dot_block(rope),
        BLOCK_ROWS=block_rows,
        BLOCK_KV=config.block_kv,
        STAGES=config.stages,
        PAGE_SIZE=cache_layer.shape[1],
        SHORT_MASK=tail.shape[1] <= 32,
        num_warps=config.warps,
        **launch_options(),
    )


def _merge(
    partial: Tensor,
    log_sums: Tensor,
    w_uv: Tensor,
    plan: AttentionPlan,
    config: AttentionConfig,
    shape: tuple[int, int, int],
) -> Tensor:
    """Join the partial results of `shape` = (rows, nodes, heads) and project them up.  # [B * M, H * v]"""
    rows, nodes, heads = shape
    value_dim, kv_lora = w_uv.shape[1:]
    count = rows * nodes
    out = partial.new_empty(count, heads * value_dim)
    results, cut = (partial, log_sums, plan.bounds), (rows, nodes, heads, config.splits)
    strides = (w_uv.stride(0), w_uv.stride(1), value_dim)
    common = {"KV_LORA": kv_lora, "LATENT": dot_block(kv_lora), **launch_options()}
    merging = {
        "BLOCK_ROWS": config.block_rows,
        "SLOTS": config.merge_slots,
        "num_warps": config.merge_warps,
        **common,
    }
    value_tiles = triton.cdiv(value_dim, config.up_values)
    if config.fused:
        _merge_up_kernel[(count, value_tiles, heads)](
            *results,
            w_uv,
            out,
            *strides,
            *cut,
            VALUES=config.up_values,
            ALL_SLOTS=triton.next_power_of_2(config.splits),
            **merging,
        )
        return out
    merged = partial.new_empty(count, heads, kv_lora)
    _merge_kernel[(count * heads,)](*results, merged, *cut, **merging)
    _up_kernel[(heads, value_tiles, triton.cdiv(count, config.up_nodes))](
        merged,
        w_uv,
        out,
        *strides,
        count,
        heads,
        NODES=config.up_nodes,
        VALUES=config.up_values,
        num_warps=config.up_warps,
        **common,
    )
    return out


def _check(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    tail: Tensor,
    mask: Tensor,
    w_uv: Tensor,
    plan: AttentionPlan,
) -> tuple[int, int, int]:
    """Refuse what the kernels do not read rightly; returns rows, nodes a row and heads."""
    (rows, nodes), (count, heads, width) = mask.shape, q.shape
    assert nodes <= MAX_TREE_NODES, f"a row has at most {MAX_TREE_NODES} nodes, not {nodes}"
    assert count == rows * nodes, f"{count} queries are not {rows} rows of {nodes} nodes"
    assert q.dtype == cache_layer.dtype == tail.dtype == w_uv.dtype == torch.bfloat16, "values must be bf16"
    assert page_table.dtype == prefix_lens.dtype == mask.dtype == torch.int64, "indices must be int64"
    assert q.is_contiguous(), "q must be contiguous"
    assert cache_layer.dim() == 3, "cache_layer must be [pages, page_size, C]"
    assert cache_layer.shape[2] == tail.shape[2] == width, "queries and entries differ in width"
    assert tail.stride(2) == w_uv.stride(2) == 1, "columns must be adjacent"
    assert cache_layer.is_contiguous(), "the cache's pages must follow each other without gaps"
    assert (page_table.shape[0], page_table.stride(1)) == (rows, 1), f"page_table must be [{rows}, P]"
    assert prefix_lens.shape == (rows,), f"prefix_lens must be [{rows}]"
    assert prefix_lens.is_contiguous(), "prefix_lens must be contiguous"
    assert mask.is_contiguous(), "mask must be contiguous"
    assert tail.shape[0] == rows, f"tail must be [{rows}, E, C]"
    assert max(page_table.stride(0), tail.stride(0)) * rows < 2**31, "page_table or tail is too far spread"
    assert w_uv.shape[0] == heads, f"w_uv must be [{heads}, v, kv_lora]"
    assert w_uv.shape[2] < width, f"w_uv has {w_uv.shape[2]} columns, an entry {width} in all"
    assert plan.bounds.shape == (rows + 1,), f"the plan is not of {rows} rows"
    assert plan.tail_len == tail.shape[1], f"the plan's tail has {plan.tail_len} entries, not {tail.shape[1]}"
    return rows, nodes, heads


@triton.jit
def _plan_kernel(  # type: ignore[no-untyped-def]
    lens_ptr, bounds_ptr, rows, tail_blocks, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    wait_alone(PDL)  # attention may come next, and reads the plan early
    row = tl.arange(0, ROWS)
    keep = row < rows
    lens = tl.load(lens_ptr + row, mask=keep, other=0).to(tl.int32)
    blocks = tl.where(keep, tl.cdiv(lens, BLOCK_KV) + tail_blocks, 0)
    tl.store(bounds_ptr + row, tl.cumsum(blocks, 0) - blocks, mask=keep)
    tl.store(bounds_ptr + rows, tl.sum(blocks, 0))


@triton.jit
def _pages(table_ptr, block, prefix, BLOCK_KV: tl.constexpr, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Page of each entry of a block; of all of them at once where a page holds whole blocks."""
    position = block * BLOCK_KV
    if PAGE_SIZE % BLOCK_KV != 0:
        position += tl.arange(0, BLOCK_KV)
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=position < prefix, other=0)
    if PAGE_SIZE % BLOCK_KV != 0:
        page = page.to(tl.int32)  # one an entry: half the registers
    return page


@triton.jit
def _entries(  # type: ignore[no-untyped-def]
    cache_ptr,
    row_tail_ptr,
    page,
    first,
    key,
    in_tail,
    tail_stride,
    BLOCK_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Address of each entry of a block that begins with entry `first` of the prefix or of the tail."""
    if PAGE_SIZE % BLOCK_KV == 0:
        slot = page * PAGE_SIZE + first % PAGE_SIZE
        begin_ptr = tl.where(in_tail, row_tail_ptr + first * tail_stride, cache_ptr + slot * WIDTH)
        return begin_ptr + key * tl.where(in_tail, tail_stride, WIDTH)
    slots = page.to(tl.int64) * PAGE_SIZE + (first + key) % PAGE_SIZE
    return tl.where(in_tail, row_tail_ptr + (first + key) * tail_stride, cache_ptr + slots * WIDTH)


@triton.jit(do_not_specialize=["rows", "nodes"])  # as constants of 1 they cost a spill
def _attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    table_ptr,
    lens_ptr,
    tail_ptr,
    mask_ptr,
    bounds_ptr,
    partial_ptr,
    log_sums_ptr,
    scale,
    table_stride,
    tail_row_stride,
    tail_stride,
    rows,
    nodes,
    heads,
    tail_len,
    slots,
    KV_LORA: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SHORT_MASK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tile, program, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    # A warp's maximum is known to be the same in all its threads, so that rows, and what depends on them, are
    # kept in uniform registers: the inner loop needs all of the others.
    lane = tl.arange(0, WARP)
    totals = tl.load(bounds_ptr + rows + lane, mask=lane == 0, other=0)
    run = tl.max(tl.cdiv(totals, splits), 0)
    total = tl.max(totals, 0)
    begin = program * run
    stop = tl.minimum(begin + run, total)
    if begin >= stop:
        return
    first_row, last_row = 0, 0
    for offset in range(0, rows, WARP):
        index = offset + lane
        ends = tl.load(bounds_ptr + 1 + index, mask=index < rows, other=2147483647)
        first_row += tl.sum((ends <= begin).to(tl.int32), 0)
        last_row += tl.sum((ends < stop).to(tl.int32), 0)

    pairs = nodes * heads
    column, rope_column = tl.arange(0, LATENT), tl.arange(0, ROPE_BLOCK)
    in_latent, in_rope = (column < KV_LORA)[None, :], (rope_column < ROPE)[None, :]
    key = tl.arange(0, BLOCK_KV)
    shift = (key & 31) if SHORT_MASK else key.to(tl.int64)
    for each in range(first_row, last_row + 1):
        # Zero, unknown to the compiler: else it computes what follows once, before the rows, and holds it in
        # registers, all of which the inner loop needs.
        zero = each >> 31
        row, here, local = each + zero, program + zero, tl.arange(0, BLOCK_ROWS) + zero
        pair = tile * BLOCK_ROWS + local
        keep = pair < pairs
        row_begin, row_end = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
        prefix = tl.load(lens_ptr + row).to(tl.int32)
        prefix_blocks = tl.cdiv(prefix, BLOCK_KV)
        row_table_ptr = table_ptr + row * table_stride
        query_ptr = q_ptr + (row * pairs).to(tl.int64) * (KV_LORA + ROPE) + pair[:, None] * (KV_LORA + ROPE)
        q_latent = tl.load(query_ptr + column[None, :], mask=keep[:, None] & in_latent, other=0.0)
        q_rope = tl.load(query_ptr + KV_LORA + rope_column[None, :], mask=keep[:, None] & in_rope, other=0.0)
        seen_ptr = mask_ptr + row * nodes + pair // heads
        seen = tl.load(seen_ptr, mask=keep, other=-1)
        if SHORT_MASK:
            seen = seen.to(tl.int32)

        peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_ROWS], tl.float32)
        values = tl.zeros([BLOCK_ROWS, LATENT], tl.float32)
        first_block = tl.maximum(here * run - row_begin, 0)
        page = _pages(row_table_ptr, first_block, prefix, BLOCK_KV, PAGE_SIZE)
        last_block = tl.minimum(here * run + run, row_end) - row_begin
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            in_tail = block >= prefix_blocks
            first = tl.where(in_tail, block - prefix_blocks, block) * BLOCK_KV
            beyond = first >> 31  # another unknown zero
            count = tl.where(in_tail, tail_len, prefix) - first  # entries from here on
            entry_ptr = _entries(
                cache_ptr,
                tail_ptr + (row + beyond) * tail_row_stride,
                page,
                first,
                key,
                in_tail,
                tail_stride,
                BLOCK_KV,
                PAGE_SIZE,
                KV_LORA + ROPE,
            )[:, None]
            present = (key < count)[:, None]
            latent = tl.load(entry_ptr + column[None, :], mask=present & in_latent, other=0.0)
            rope = tl.load(entry_ptr + KV_LORA + rope_column[None, :], mask=present & in_rope, other=0.0)
            # The next block's page is asked for one round ahead, so that its loads need not wait for it.
            page = _pages(table_ptr + (row + beyond) * table_stride, block + 1, prefix, BLOCK_KV, PAGE_SIZE)
            # Always so: no block is empty. Branches shape what Triton makes of the loop: two products in one
            # region it takes for a chain and has both warp groups compute all scores; and it issues the next
            # block's loads before branches, but after products, where little is left to hide them. An empty
            # block's entries are zero, and so would be its weights.
            if count > 0:
                scores = tl.dot(q_latent, tl.trans(latent)) * scale
                scores += tl.dot(q_rope, tl.trans(rope)) * scale
                word = tl.where(in_tail, seen >> first, -1)
                visible = (key < count)[None, :] & (((word[:, None] >> shift[None, :]) & 1) != 0)
                scores = tl.where(visible, scores, float("-inf"))
                new_peak = tl.maximum(peak, tl.max(scores, 1))
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: all weights 0
                exact = tl.exp2(scores - base[:, None])
                shrink = tl.exp2(peak - base)
                norm = norm * shrink + tl.sum(exact, 1)
                peak = new_peak
                weights = exact.to(latent.dtype)
            else:
                weights = tl.dot(q_rope, tl.trans(rope)).to(latent.dtype)
                shrink = tl.full([BLOCK_ROWS], 1.0, tl.float32)
            if block >= 0:
                values = tl.dot(weights, latent, values * shrink[:, None])

        slot = ((tile + zero) * slots + here + row).to(tl.int64)
        some = norm != 0.0  # a NaN stays one
        result = values * (1.0 / tl.where(some, norm, 1.0))[:, None]
        tl.store(
            partial_ptr + slot * (BLOCK_ROWS * KV_LORA) + (local[:, None] * KV_LORA + column[None, :]),
            result.to(partial_ptr.dtype.element_ty),
            mask=keep[:, None] & in_latent,
        )
        log_sum = tl.where(some, peak + tl.log2(tl.where(some, norm, 1.0)), float("-inf"))
        tl.store(log_sums_ptr + slot * BLOCK_ROWS + local, log_sum, mask=keep)


@triton.jit
def _results_of(bounds_ptr, row, pair, rows, splits, BLOCK_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a (node, head) pair's partial results begin, BLOCK_ROWS apart, and how many there are.

    May be asked before the attention kernel has ended, for the plan came before that.
    """
    run = tl.cdiv(tl.load(bounds_ptr + rows, cache_modifier=EARLY), splits)
    first = tl.load(bounds_ptr + row, cache_modifier=EARLY) // run
    count = (tl.load(bounds_ptr + row + 1, cache_modifier=EARLY) - 1) // run - first + 1
    first_slot = (pair // BLOCK_ROWS).to(tl.int64) * (splits + rows - 1) + first + row
    return first_slot * BLOCK_ROWS + pair % BLOCK_ROWS, count


@triton.jit
def _merge_up_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    log_sums_ptr,
    bounds_ptr,
    w_uv_ptr,
    out_ptr,
    weight_head_stride,
    weight_stride,
    value_dim,
    rows,
    nodes,
    heads,
    splits,
    KV_LORA: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some values of one (node, head) pair: its partial results merged, times rows of w_uv."""
    head = tl.program_id(2)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, LATENT)
    weight = tl.load(  # a constant: it may come before the partial results are there
        w_uv_ptr + head.to(tl.int64) * weight_head_stride + value[:, None] * weight_stride + column[None, :],
        mask=(value < value_dim)[:, None] & (column < KV_LORA)[None, :],
        other=0.0,
    )
    node = tl.program_id(0)
    row = node // nodes
    pair = (node % nodes) * heads + head
    start, count = _results_of(bounds_ptr, row, pair, rows, splits, BLOCK_ROWS)
    wait_for_inputs(PDL)

    every = tl.arange(0, ALL_SLOTS)
    log_sums = tl.load(log_sums_ptr + start + every * BLOCK_ROWS, mask=every < count, other=float("-inf"))
    peak = tl.max(log_sums, 0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)  # a pair of NaNs has no peak
    norm = tl.sum(tl.exp2(log_sums - peak), 0)
    slot = tl.arange(0, SLOTS)
    merged = tl.zeros([LATENT], tl.float32)
    for offset in range(0, count, SLOTS):
        place = start + (offset + slot) * BLOCK_ROWS
        there = offset + slot < count
        log_sum = tl.load(log_sums_ptr + place, mask=there, other=float("-inf"))
        part = tl.load(
            partial_ptr + place[:, None] * KV_LORA + column[None, :],
            mask=there[:, None] & (column < KV_LORA)[None, :],
            other=0.0,
        )
        merged += tl.sum(part.to(tl.float32) * (tl.exp2(log_sum - peak) / norm)[:, None], 0)
    latent = merged.to(weight.dtype)
    out = tl.sum(latent.to(tl.float32)[None, :] * weight.to(tl.float32), 1)
    target = (node.to(tl.int64) * heads + head) * value_dim + value
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=value < value_dim)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    log_sums_ptr,
    bounds_ptr,
    merged_ptr,
    rows,
    nodes,
    heads,
    splits,
    KV_LORA: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (node, head) pair: its partial results, weighted by their shares of the softmax's sum."""
    number = tl.program_id(0)
    row = number // (nodes * heads)
    pair = number % (nodes * heads)
    start, count = _results_of(bounds_ptr, row, pair, rows, splits, BLOCK_ROWS)
    wait_for_inputs(PDL)

    column, slot = tl.arange(0, LATENT), tl.arange(0, SLOTS)
    keep = (column < KV_LORA)[None, :]
    peak, norm = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    merged = tl.zeros([LATENT], tl.float32)
    for offset in range(0, count, SLOTS):
        place = start + (offset + slot) * BLOCK_ROWS
        there = offset + slot < count
        log_sum = tl.load(log_sums_ptr + place, mask=there, other=float("-inf"))
        part = tl.load(
            partial_ptr + place[:, None] * KV_LORA + column[None, :], mask=there[:, None] & keep, other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(log_sum, 0))
        base = tl.where(new_peak > float("-inf"), new_peak, 0.0)  # a pair of NaNs has no peak
        share, shrink = tl.exp2(log_sum - base), tl.exp2(peak - base)
        merged = merged * shrink + tl.sum(part.to(tl.float32) * share[:, None], 0)
        norm = norm * shrink + tl.sum(share, 0)
        peak = new_peak
    merged_ptrs = merged_ptr + number.to(tl.int64) * KV_LORA + column
    tl.store(merged_ptrs, (merged / norm).to(merged_ptr.dtype.element_ty), mask=column < KV_LORA)


@triton.jit
def _up_kernel(  # type: ignore[no-untyped-def]
    merged_ptr,
    w_uv_ptr,
    out_ptr,
    weight_head_stride,
    weight_stride,
    value_dim,
    count,
    heads,
    KV_LORA: tl.constexpr,
    LATENT: tl.constexpr,
    NODES: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some values of one head for NODES nodes: merged latents times w_uv."""
    head = tl.program_id(0)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, LATENT)
    weight = tl.load(  # a constant: it may come before the latents are there
        w_uv_ptr + head.to(tl.int64) * weight_head_stride + value[:, None] * weight_stride + column[None, :],
        mask=(value < value_dim)[:, None] & (column < KV_LORA)[None, :],
        other=0.0,
    )
    wait_for_inputs(PDL)
    node = tl.program_id(2) * NODES + tl.arange(0, NODES)
    pair = node.to(tl.int64) * heads + head
    keep = (node < count)[:, None]
    latent = tl.load(
        merged_ptr + pair[:, None] * KV_LORA + column[None, :],
        mask=keep & (column < KV_LORA)[None, :],
        other=0.0,
    )
    out = tl.dot(latent, tl.trans(weight))
    target = pair[:, None] * value_dim + value[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=keep & (value < value_dim)[None, :])
