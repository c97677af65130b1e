"""Growth, rerank and acceptance of draft trees, one launch each; twins in kernels/ref/tree_ops.py.

One program does a row, for a row's whole tree fits registers and each step needs the one before. Floats are
compared as integers of the same order, whose least is free to mark what is taken or padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import launch_options, wait_for_inputs
from nextn.kernels.ref.attention import MAX_TREE_NODES
from nextn.kernels.ref.tree_ops import BeamState, Pool, level_start

FLOATS = (torch.float32, torch.float64)


def choose_warps(elements: int) -> int:
    """Warps a program: one needs no barriers in its reductions, so it serves up to 16 elements a thread."""
    if elements <= 512:
        return 1
    return 4 if elements <= 2048 else 8


def expand(
    tokens: Tensor,
    values: Tensor,
    beam: BeamState | None,
    pool: Pool,
    level: int,
    *,
    config: int | None = None,
) -> BeamState | None:
    """Enter level `level`'s candidates into `pool` and return the beam that they give, or None at the last.

    tokens [B, m, k] int64 and values [B, m, k] float32 or float64, m = 1 at level 1, else k; `beam` is the
    one whose children they are, None at level 1. config: warps a program.
    """
    rows, parents, k = tokens.shape
    count, start = parents * k, level_start(level, k)
    assert (level == 1) == (beam is None), "level 1 hangs on the root, every other on a beam"
    assert parents == (1 if beam is None else k), f"{parents} parents, the level has {k} or the root"
    assert values.shape == tokens.shape, f"values must be {tuple(tokens.shape)}, is {tuple(values.shape)}"
    assert values.dtype in FLOATS, f"values must be float32 or float64, is {values.dtype}"
    assert pool.values.dtype == values.dtype, f"the pool holds {pool.values.dtype}, values are {values.dtype}"
    assert start + count <= pool.tokens.shape[1], "the pool has no room for this level"
    last = 1 + level * k > pool.fed.shape[1]
    assert last or level * k <= MAX_TREE_NODES, f"a beam's entries must be at most {MAX_TREE_NODES}"
    if beam is not None:
        assert beam.values.dtype == values.dtype, f"the beam holds {beam.values.dtype}"
        assert beam.path_tokens.shape == (rows, k, level - 1), f"the beam is not of level {level - 1}"
    _check_pool(pool)
    following = None if last else _empty_beam(tokens, values, pool, level)
    if rows == 0:
        return following
    elements = triton.next_power_of_2(count)
    _expand_kernel[(rows,)](
        tokens.contiguous(),
        values.contiguous(),
        *((None,) * 3 if beam is None else _read(beam)),
        pool.tokens,
        pool.values,
        pool.fed,
        *((None,) * 5 if following is None else _written(following)),
        count,
        start,
        level,
        pool.tokens.shape[1],
        pool.fed.shape[1],
        K=k,
        BLOCK=elements,
        PATH_BLOCK=triton.next_power_of_2(level),
        FIRST=beam is None,
        LAST=last,
        num_warps=config or choose_warps(elements),
        **launch_options(),
    )
    return following


def rerank(
    root: Tensor, pool: Pool, k: int, nodes: int, *, config: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tree of `root` [B] int64 and the nodes-1 best candidates of a full pool.

    Returns tokens, parents, depth, mask [B, D] int64 and logp [B, D] of the pool's dtype. config: warps.
    """
    rows, size = pool.values.shape
    assert root.shape == (rows,), f"root must be [{rows}], is {tuple(root.shape)}"
    assert root.dtype == torch.int64, f"root must be int64, is {root.dtype}"
    assert pool.values.dtype in FLOATS, f"values must be float32 or float64, is {pool.values.dtype}"
    assert 2 <= nodes <= min(size + 1, MAX_TREE_NODES), f"{nodes} nodes do not fit {size} candidates"
    _check_pool(pool)
    tokens, parents, depth, mask = root.new_empty(4, rows, nodes).unbind()
    logp = pool.values.new_empty(rows, nodes)
    if rows:
        elements = triton.next_power_of_2(size)
        _rerank_kernel[(rows,)](
            root.contiguous(),
            pool.tokens,
            pool.values,
            pool.fed,
            tokens,
            parents,
            depth,
            mask,
            logp,
            size,
            pool.fed.shape[1],
            nodes,
            K=k,
            BLOCK=elements,
            NODES=triton.next_power_of_2(nodes),
            DOUBLINGS=(nodes - 1).bit_length(),
            num_warps=config or choose_warps(elements),
            **launch_options(),
        )
    return tokens, parents, depth, mask, logp


def accept_path(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The accept walk: path [B, W], length [B] and emitted tokens [B, W], all int64, from [B, D] int64."""
    rows, nodes = tokens.shape
    for name, each in (("parents", parents), ("target_tokens", target_tokens)):
        assert each.shape == tokens.shape, f"{name} must be {tuple(tokens.shape)}, is {tuple(each.shape)}"
        assert each.dtype == tokens.dtype == torch.int64, f"{name} and tokens must be int64"
    assert 1 <= nodes <= MAX_TREE_NODES, f"a tree of {nodes} nodes"
    assert width >= 1, f"{width} tokens to emit"
    path, emitted = tokens.new_empty(2, rows, width).unbind()
    length = tokens.new_empty(rows)
    if rows:
        _accept_kernel[(rows,)](
            tokens.contiguous(),
            parents.contiguous(),
            target_tokens.contiguous(),
            path,
            length,
            emitted,
            nodes,
            width,
            NODES=triton.next_power_of_2(nodes),
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
            **launch_options(),
        )
    return path, length, emitted


def _check_pool(pool: Pool) -> None:
    for name, part in zip(pool._fields, pool, strict=True):
        assert part.is_contiguous(), f"the pool's {name} must be contiguous"


def _empty_beam(tokens: Tensor, values: Tensor, pool: Pool, level: int) -> BeamState:
    """Memory for a beam; its flat numbers stand in the pool's `fed`."""
    rows, _, k = tokens.shape
    chosen, slots, mask = tokens.new_empty(3, rows, k).unbind()
    flat = pool.fed[:, 1 + (level - 1) * k : 1 + level * k]
    return BeamState(chosen, values.new_empty(rows, k), slots, flat, mask, tokens.new_empty(rows, k, level))


def _read(beam: BeamState) -> tuple[Tensor, ...]:
    return beam.values.contiguous(), beam.mask.contiguous(), beam.path_tokens.contiguous()


def _written(beam: BeamState) -> tuple[Tensor, ...]:
    return beam.tokens, beam.values, beam.parent_slot, beam.mask, beam.path_tokens


@triton.jit
def order_key(value, valid):  # type: ignore[no-untyped-def]
    """Integers as wide as the floats and in their order, -0 equal to 0; the least integer where not valid."""
    value = tl.where(value == 0.0, 0.0, value)
    if value.dtype == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = value.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return drop_key(key, valid == 0)


@triton.jit
def drop_key(key, gone):  # type: ignore[no-untyped-def]
    """Put the keys that are `gone` below every float's."""
    least: tl.constexpr = -(1 << (key.dtype.primitive_bitwidth - 1))
    return tl.where(gone, least, key)


@triton.jit
def log_value(value):  # type: ignore[no-untyped-def]
    """NaN as -inf, and nothing above 0."""
    return tl.where(value == value, tl.where(value > 0.0, 0.0, value), float("-inf"))


@triton.jit
def take_best(key, index, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The `count` best places in descending order of their keys, ties to the lower place: [SIZE] int32."""
    lane = tl.arange(0, SIZE)
    taken = tl.full((SIZE,), 0, tl.int32)
    for rank in range(count):
        _, place = tl.max(key, axis=0, return_indices=True, return_indices_tie_break_left=True)
        taken = tl.where(lane == rank, place, taken)
        key = drop_key(key, index == place)
    return taken


@triton.jit
def _expand_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    values_ptr,
    beam_values_ptr,
    beam_mask_ptr,
    beam_path_ptr,
    pool_tokens_ptr,
    pool_values_ptr,
    fed_ptr,
    next_tokens_ptr,
    next_values_ptr,
    next_slot_ptr,
    next_mask_ptr,
    next_path_ptr,
    count,
    start,
    level,
    pool_size,
    fed_size,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    valid = place < count
    tokens_ptr += row * count
    values_ptr += row * count
    token = tl.load(tokens_ptr + place, mask=valid, other=0)
    value = log_value(tl.load(values_ptr + place, mask=valid, other=0.0))
    if not FIRST:
        value += tl.load(beam_values_ptr + row * K + place // K, mask=valid, other=0.0)
    tl.store(pool_tokens_ptr + row * pool_size + start + place, token, mask=valid)
    tl.store(pool_values_ptr + row * pool_size + start + place, value, mask=valid)
    if FIRST:
        tl.store(fed_ptr + row * fed_size, 0)
    if not LAST:
        SLOTS: tl.constexpr = triton.next_power_of_2(K)
        slot = tl.arange(0, SLOTS)
        keep = slot < K
        if FIRST:
            best = slot  # in the order given: by score, which need not be the order of values
        else:
            best = take_best(order_key(value, valid), place, K, SLOTS)
        parent = best // K  # 0 at level 1
        token = tl.load(tokens_ptr + best, mask=keep, other=0)
        value = log_value(tl.load(values_ptr + best, mask=keep, other=0.0))
        mask = tl.full((SLOTS,), 1, tl.int64) << (slot + (level - 1) * K).to(tl.int64)
        beam_node = row * K + parent
        if not FIRST:
            value += tl.load(beam_values_ptr + beam_node, mask=keep, other=0.0)
            mask |= tl.load(beam_mask_ptr + beam_node, mask=keep, other=0)
        out = row * K + slot
        tl.store(next_tokens_ptr + out, token, mask=keep)
        tl.store(next_values_ptr + out, value, mask=keep)
        tl.store(next_slot_ptr + out, parent.to(tl.int64), mask=keep)
        tl.store(next_mask_ptr + out, mask, mask=keep)
        flat = (best + start).to(tl.int64)
        tl.store(fed_ptr + row * fed_size + 1 + (level - 1) * K + slot, flat, mask=keep)
        step = tl.arange(0, PATH_BLOCK)[None, :]
        path = tl.broadcast_to(token[:, None], (SLOTS, PATH_BLOCK))
        if not FIRST:
            above = keep[:, None] & (step < level - 1)
            source = beam_path_ptr + beam_node[:, None] * (level - 1) + step
            path = tl.where(above, tl.load(source, mask=above, other=0), path)
        tl.store(next_path_ptr + out[:, None] * level + step, path, mask=keep[:, None] & (step < level))


@triton.jit
def _rerank_kernel(  # type: ignore[no-untyped-def]
    root_ptr,
    pool_tokens_ptr,
    pool_values_ptr,
    fed_ptr,
    tokens_ptr,
    parents_ptr,
    depth_ptr,
    mask_ptr,
    logp_ptr,
    pool_size,
    fed_size,
    nodes,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    pool_tokens_ptr += row * pool_size
    pool_values_ptr += row * pool_size
    place = tl.arange(0, BLOCK)
    valid = place < pool_size
    value = tl.load(pool_values_ptr + place, mask=valid, other=0.0)
    best = take_best(order_key(value, valid), place, nodes - 1, NODES)

    # In ascending order: the root as number -1, the chosen candidates, and padding above them all.
    node = tl.arange(0, NODES)
    flat = tl.sort(tl.where(node < nodes - 1, best, tl.where(node == nodes - 1, -1, 0x7FFFFFFF)))
    drafted = (node > 0) & (node < nodes)
    group = flat // K
    above = tl.load(fed_ptr + row * fed_size + group, mask=drafted & (group > 0), other=-1).to(tl.int32)
    parent = tl.sum((flat[None, :] < above[:, None]).to(tl.int32), axis=1)  # the parent's place

    up = tl.where(drafted, parent, 0)
    mask = tl.full((NODES,), 1, tl.int64) << node.to(tl.int64)
    for _ in range(DOUBLINGS):  # ancestors 1, 2, 4, ... levels up join
        mask |= tl.gather(mask, up, 0)
        up = tl.gather(up, up, 0)

    token = tl.load(pool_tokens_ptr + flat, mask=drafted, other=0)
    token = tl.where(drafted, token, tl.load(root_ptr + row))
    logp = tl.load(pool_values_ptr + flat, mask=drafted, other=0.0)
    depth = tl.where(flat < 0, 0, tl.where(flat < K, 1, 2 + (flat - K) // (K * K)))
    out = row * nodes + node
    keep = node < nodes
    tl.store(tokens_ptr + out, token, mask=keep)
    tl.store(parents_ptr + out, tl.where(drafted, parent, -1).to(tl.int64), mask=keep)
    tl.store(depth_ptr + out, depth.to(tl.int64), mask=keep)
    tl.store(mask_ptr + out, mask, mask=keep)
    tl.store(logp_ptr + out, logp, mask=keep)


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    target_ptr,
    path_ptr,
    length_ptr,
    emitted_ptr,
    nodes,
    width,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    target_ptr += row * nodes
    node = tl.arange(0, NODES)
    drafted = (node > 0) & (node < nodes)
    parent = tl.load(parents_ptr + row * nodes + node, mask=drafted, other=-1)
    token = tl.load(tokens_ptr + row * nodes + node, mask=drafted, other=0)
    agrees = drafted & (token == tl.load(target_ptr + parent, mask=drafted, other=0))
    parent = tl.where(agrees, parent, -1).to(tl.int32)

    step = tl.arange(0, WIDTH)
    here = 0
    length = tl.full((), 1, tl.int64)
    path = tl.full((WIDTH,), 0, tl.int32)
    for at in range(1, width):
        child = tl.min(tl.where(parent == here, node, NODES), axis=0)
        length += (child < NODES).to(tl.int64)
        here = tl.where(child < NODES, child, here)
        path = tl.where(step == at, here, path)

    keep = step < width
    tl.store(path_ptr + row * width + step, path.to(tl.int64), mask=keep)
    tl.store(emitted_ptr + row * width + step, tl.load(target_ptr + path, mask=keep, other=0), mask=keep)
    tl.store(length_ptr + row, length)
