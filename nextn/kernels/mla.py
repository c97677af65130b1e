"""Around the attention of a decode: cache entries and absorbed queries; twins in kernels/ref/mla.py.

Both are short, so each is one launch whose programs do different things side by side instead of one after
the other: norm of the query's input, norm of the latent and rotation of the key in one, columns of the
absorbed query and its rotated part in the other. Results do not depend on how many tokens there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import EARLY, dot_block, launch_options, wait_for_inputs
from nextn.kernels.norm import add_summands, check_summands, check_valid, normalise
from nextn.kernels.ref.rope import RotaryTables


class LatentConfig(NamedTuple):
    """Warps that share one part of a token."""

    warps: int


class AbsorbConfig(NamedTuple):
    """Tokens and latent columns of one program, and its warps."""

    tokens: int
    columns: int
    warps: int


def latent_config(q_lora: int, kv_lora: int) -> LatentConfig:
    """128 elements a warp: a thread has 4 of each summand, and all summands are under way at once."""
    return LatentConfig(min(16, max(1, triton.next_power_of_2(max(q_lora, kv_lora)) // 128)))


def absorb_config(tokens: int, heads: int, kv_lora: int) -> AbsorbConfig:
    """Few heads are cut into narrower columns, so that the weight is read by all multiprocessors.

    More tokens sum the same summands again in every column block, so then there are fewer of these.
    """
    columns = (64 if heads <= 32 else 128) if tokens <= 16 else 256
    return AbsorbConfig(16, min(columns, dot_block(kv_lora)), 4)


def prepare_latents(
    summands: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor,
    eps: float,
    rotary: RotaryTables,
    positions: Tensor,
    slots: Tensor | None,
    valid: Tensor | None,
    cache_layer: Tensor,
    tail: Tensor,
    *,
    config: LatentConfig | None = None,
) -> Tensor | None:
    """Normalise both halves of the down projection, rotate the key, store entries.  # [N, q_lora] or None

    summands [S, N, q_lora + C] float32 or bfloat16 hold the rows of q_a (none if q_norm is None), then
    kv_lora rows of latents, then the shared key. The entry [latent, key] of every node goes to
    tail [B, M, C] of any row and node strides, N = B * M, and to cache_layer [pages, page_size, C] at
    `slots` [N] int64 where `valid` [N] bool; slots None: not there. positions [N] int64. Norms, cache, tail
    and the result are bfloat16; each value is rounded once. Slots of invalid entries are not used.
    AssertionError for other shapes, strides and dtypes.
    """
    parts, count, width = check_summands(summands)
    q_lora, kv_lora = 0 if q_norm is None else q_norm.shape[0], kv_norm.shape[0]
    rope = _check_rotary(rotary, positions, count)
    assert width == q_lora + kv_lora + rope, f"{width} columns are not {q_lora} + {kv_lora} + {rope}"
    for name, norm in (("q_norm", q_norm), ("kv_norm", kv_norm)):
        assert norm is None or norm.is_contiguous(), f"{name} must be contiguous"
    _check_entries(cache_layer, tail, count, kv_lora + rope)
    for tensor in (q_norm, kv_norm, cache_layer, tail):
        assert tensor is None or tensor.dtype == torch.bfloat16, f"must be bfloat16, is {tensor.dtype}"
    assert slots is None or (slots.shape == (count,) and slots.dtype == torch.int64), "slots: [N] int64"
    assert slots is None or slots.is_contiguous(), "slots must be contiguous"
    check_valid(valid, count)
    q_in = None if q_norm is None else torch.empty(count, q_lora, dtype=q_norm.dtype, device=q_norm.device)
    if count:
        _prepare_latents_kernel[(count, 2 if q_norm is None else 3)](
            summands,
            q_norm,
            kv_norm,
            rotary.cos,
            rotary.sin,
            positions,
            slots,
            valid,
            cache_layer,
            tail,
            q_in,
            summands.stride(0),
            summands.stride(1),
            cache_layer.stride(1),
            tail.stride(0),
            tail.stride(1),
            tail.shape[1],
            eps,
            Q_LORA=q_lora,
            KV_LORA=kv_lora,
            HALF_ROPE=rope // 2,
            INTERLEAVE=rotary.interleave,
            Q_BLOCK=triton.next_power_of_2(max(q_lora, 1)),
            KV_BLOCK=triton.next_power_of_2(kv_lora),
            PAIR_BLOCK=triton.next_power_of_2(rope // 2),
            S=parts,
            num_warps=(config or latent_config(q_lora, kv_lora)).warps,
            **launch_options(),
        )
    return q_in


def absorb_queries(
    summands: Tensor,
    w_uk: Tensor,
    rotary: RotaryTables,
    positions: Tensor,
    *,
    config: AbsorbConfig | None = None,
) -> Tensor:
    """Queries in latent space: [q_nope @ w_uk, rotated q_pe] a head.  # [N, H, kv_lora + rope] bfloat16

    summands [S, N, H * (nope + rope)] float32 or bfloat16, w_uk [H, nope, kv_lora] bfloat16 of any head and
    row strides, positions [N] int64. q_nope is rounded to bfloat16 before the product. AssertionError for
    other shapes, strides and dtypes.
    """
    parts, count, width = check_summands(summands)
    heads, nope, kv_lora = w_uk.shape
    rope = _check_rotary(rotary, positions, count)
    assert width == heads * (nope + rope), f"{width} columns are not {heads} heads of {nope} + {rope}"
    assert w_uk.dtype == torch.bfloat16, f"w_uk must be bfloat16, is {w_uk.dtype}"
    assert w_uk.stride(2) == 1, "the columns of w_uk must be adjacent"
    q = torch.empty(count, heads, kv_lora + rope, dtype=w_uk.dtype, device=w_uk.device)
    if count:
        config = config or absorb_config(count, heads, kv_lora)
        tiles = triton.cdiv(kv_lora, config.columns)
        _absorb_queries_kernel[(heads, tiles + 1, triton.cdiv(count, config.tokens))](
            summands,
            w_uk,
            rotary.cos,
            rotary.sin,
            positions,
            q,
            count,
            summands.stride(0),
            summands.stride(1),
            w_uk.stride(0),
            w_uk.stride(1),
            q.stride(0),
            NOPE=nope,
            KV_LORA=kv_lora,
            HALF_ROPE=rope // 2,
            INTERLEAVE=rotary.interleave,
            TILES=tiles,
            TOKENS=config.tokens,
            COLUMNS=config.columns,
            NOPE_BLOCK=dot_block(nope),
            PAIR_BLOCK=triton.next_power_of_2(rope // 2),
            S=parts,
            num_warps=config.warps,
            **launch_options(),
        )
    return q


def _check_rotary(rotary: RotaryTables, positions: Tensor, count: int) -> int:
    """The width that the tables turn."""
    cos, sin = rotary.cos, rotary.sin
    assert cos.dtype == sin.dtype == torch.float32, f"rotary tables must be float32, are {cos.dtype}"
    assert cos.shape == sin.shape, "cos and sin must have one shape"
    assert cos.is_contiguous(), "rotary tables must be contiguous"
    assert sin.is_contiguous(), "rotary tables must be contiguous"
    assert positions.shape == (count,), f"positions must be [{count}], is {tuple(positions.shape)}"
    assert positions.dtype == torch.int64, f"positions must be int64, are {positions.dtype}"
    assert positions.is_contiguous(), "positions must be contiguous"
    return 2 * cos.shape[1]


def _check_entries(cache_layer: Tensor, tail: Tensor, count: int, width: int) -> None:
    """[pages, page_size, C] with slots at one stride across pages, and [B, M, C] for `count` nodes."""
    assert cache_layer.shape[2] == width, f"the cache has {cache_layer.shape[2]} columns, entries {width}"
    assert cache_layer.stride(2) == 1, "a cache entry's columns must be adjacent"
    assert cache_layer.stride(0) == cache_layer.shape[1] * cache_layer.stride(1), (
        "pages must follow each other"
    )
    assert tail.shape[2] == width, f"the tail has {tail.shape[2]} columns, entries {width}"
    assert tail.shape[0] * tail.shape[1] == count, f"a tail {tuple(tail.shape)} does not hold {count} nodes"
    assert tail.stride(2) == 1, "a tail entry's columns must be adjacent"


@triton.jit
def _rotated_pairs(  # type: ignore[no-untyped-def]
    rope_ptr,
    cos_ptr,
    sin_ptr,
    table,
    keep,
    summand_stride,
    HALF_ROPE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    """The turned first and second elements of each pair of summed rows [tokens, 1], [tokens, pairs] each.

    rope_ptr points to the rows' rope parts, `table` is where the tokens' rows of factors begin.
    """
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    first_ptr = rope_ptr + (pair * 2 if INTERLEAVE else pair)
    cos = tl.load(cos_ptr + table + pair, mask=keep, other=0.0)
    sin = tl.load(sin_ptr + table + pair, mask=keep, other=0.0)
    first = add_summands(first_ptr, keep, summand_stride, S)
    second = add_summands(first_ptr + (1 if INTERLEAVE else HALF_ROPE), keep, summand_stride, S)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_pairs(  # type: ignore[no-untyped-def]
    rope_ptr,
    first,
    second,
    keep,
    HALF_ROPE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):
    """Put turned pairs back into rows whose rope parts start at rope_ptr [tokens, 1]."""
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    first_ptr = rope_ptr + (pair * 2 if INTERLEAVE else pair)
    dtype: tl.constexpr = rope_ptr.dtype.element_ty
    tl.store(first_ptr, first.to(dtype), mask=keep)
    tl.store(first_ptr + (1 if INTERLEAVE else HALF_ROPE), second.to(dtype), mask=keep)


@triton.jit
def _slot_of(token, slots_ptr, valid_ptr):  # type: ignore[no-untyped-def]
    """The token's slot and whether it is written there: loaded early, for they are used at the end."""
    slot = token
    write = token >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token)
        if valid_ptr is not None:
            write = tl.load(valid_ptr + token) != 0
    return slot, write


@triton.jit
def _norm_part(  # type: ignore[no-untyped-def]
    part_ptr, weight, keep, summand_stride, eps, SIZE: tl.constexpr, S: tl.constexpr
):
    """The normalised sum of the summands at part_ptr (pointers to SIZE columns and padding)."""
    return normalise(add_summands(part_ptr, keep, summand_stride, S), weight, eps, SIZE)


@triton.jit(do_not_specialize=["nodes"])  # in prefill all tokens are one row's
def _prepare_latents_kernel(  # type: ignore[no-untyped-def]
    summands_ptr,
    q_norm_ptr,
    kv_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    valid_ptr,
    cache_ptr,
    tail_ptr,
    q_ptr,
    summand_stride,
    token_stride,
    slot_stride,
    tail_row_stride,
    tail_node_stride,
    nodes,
    eps,
    Q_LORA: tl.constexpr,
    KV_LORA: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    part = tl.program_id(1)
    token = index.to(tl.int64)
    row_ptr = summands_ptr + token * token_stride
    latent_ptr = row_ptr + Q_LORA
    # Divided in 32 bits, for 64 take a hundred cycles more.
    tail_ptr += (index // nodes).to(tl.int64) * tail_row_stride + (index % nodes).to(
        tl.int64
    ) * tail_node_stride
    # The branches share no names: Triton would want one type for each.
    if part == 0:
        column = tl.arange(0, KV_BLOCK)
        keep = column < KV_LORA
        weight = tl.load(kv_norm_ptr + column, mask=keep, other=0.0)
        wait_for_inputs(PDL)
        latent_slot, write_latent = _slot_of(token, slots_ptr, valid_ptr)
        latent = _norm_part(latent_ptr + column, weight, keep, summand_stride, eps, KV_LORA, S)
        entry = latent.to(tail_ptr.dtype.element_ty)
        tl.store(tail_ptr + column, entry, mask=keep)
        if slots_ptr is not None:
            tl.store(cache_ptr + latent_slot * slot_stride + column, entry, mask=keep & write_latent)
    elif part == 1:
        in_rope = (tl.arange(0, PAIR_BLOCK) < HALF_ROPE)[None, :]
        table = tl.load(positions_ptr + token, cache_modifier=EARLY) * HALF_ROPE
        wait_for_inputs(PDL)
        key_slot, write_key = _slot_of(token, slots_ptr, valid_ptr)
        key_ptr = latent_ptr + KV_LORA
        first, second = _rotated_pairs(
            key_ptr, cos_ptr, sin_ptr, table, in_rope, summand_stride, HALF_ROPE, INTERLEAVE, PAIR_BLOCK, S
        )
        _store_pairs(tail_ptr + KV_LORA, first, second, in_rope, HALF_ROPE, INTERLEAVE, PAIR_BLOCK)
        if slots_ptr is not None:
            slot_ptr = cache_ptr + key_slot * slot_stride + KV_LORA
            _store_pairs(slot_ptr, first, second, in_rope & write_key, HALF_ROPE, INTERLEAVE, PAIR_BLOCK)
    elif q_norm_ptr is not None:
        q_column = tl.arange(0, Q_BLOCK)
        in_q = q_column < Q_LORA
        q_weight = tl.load(q_norm_ptr + q_column, mask=in_q, other=0.0)
        wait_for_inputs(PDL)
        q = _norm_part(row_ptr + q_column, q_weight, in_q, summand_stride, eps, Q_LORA, S)
        tl.store(q_ptr + token * Q_LORA + q_column, q.to(q_ptr.dtype.element_ty), mask=in_q)
    else:  # there is no such program
        wait_for_inputs(PDL)


@triton.jit
def _add_in_loop(pointers, keep, summand_stride, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """add_summands for an operand of a product; LLVM unrolls the loop.

    Unrolled by Triton, the sum would be brought into the product's layout summand by summand, each through
    shared memory and behind barriers. A loop is left alone, and only its result is moved.
    """
    total = tl.zeros(pointers.shape, tl.float32)
    for _ in tl.range(S):
        total += tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
        pointers += summand_stride
    return total


@triton.jit
def _absorb_queries_kernel(  # type: ignore[no-untyped-def]
    summands_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_ptr,
    count,
    summand_stride,
    token_stride,
    weight_head_stride,
    weight_row_stride,
    q_stride,
    NOPE: tl.constexpr,
    KV_LORA: tl.constexpr,
    HALF_ROPE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    live = token < count
    row_ptr = summands_ptr + token * token_stride + head * (NOPE + 2 * HALF_ROPE)
    out_ptr = q_ptr + token * q_stride + head * (KV_LORA + 2 * HALF_ROPE)
    # The branches share no names: Triton would want one type for each.
    if tile < TILES:
        inner = tl.arange(0, NOPE_BLOCK)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        weight_ptr += head.to(tl.int64) * weight_head_stride
        weight = tl.load(
            weight_ptr + inner[:, None] * weight_row_stride + column,
            mask=(inner < NOPE)[:, None] & (column < KV_LORA),
            other=0.0,
        )
        wait_for_inputs(PDL)
        in_nope = live & (inner < NOPE)[None, :]
        nope = _add_in_loop(row_ptr + inner[None, :], in_nope, summand_stride, S)
        absorbed = tl.dot(nope.to(q_ptr.dtype.element_ty), weight)
        in_tile = live & (column < KV_LORA)
        tl.store(out_ptr + column, absorbed.to(q_ptr.dtype.element_ty), mask=in_tile)
    else:
        in_rope = live & (tl.arange(0, PAIR_BLOCK) < HALF_ROPE)[None, :]
        table = tl.load(positions_ptr + token, mask=live, other=0, cache_modifier=EARLY) * HALF_ROPE
        wait_for_inputs(PDL)
        rope_ptr = row_ptr + NOPE
        first, second = _rotated_pairs(
            rope_ptr, cos_ptr, sin_ptr, table, in_rope, summand_stride, HALF_ROPE, INTERLEAVE, PAIR_BLOCK, S
        )
        _store_pairs(out_ptr + KV_LORA, first, second, in_rope, HALF_ROPE, INTERLEAVE, PAIR_BLOCK)
