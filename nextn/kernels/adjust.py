"""What comes between logits and the choice, one launch: grammar, penalties, biases, bans and filters.

One program goes over a node's vocabulary in blocks, as often as it must: what it reads again is in the L1.
The filters need no sort of the vocabulary. A few passes that count find a score above which there are at
least as many tokens as top_k leaves, and at most CANDIDATES; among these each one's rank and the mass ahead
of it are sums over all pairs. Where the front that stays is longer than that, it is found bit by bit of the
score and of the token id instead. The result is logits again, -inf where a token is impossible, for the
kernels of vocab.py. Twin: `adjust_logits` in kernels/ref/sampling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import EARLY, launch_options, prefetch, wait_for_inputs
from nextn.kernels.ref.sampling import SamplingBatch
from nextn.kernels.tree_ops import order_key
from nextn.kernels.vocab import finite, temper

MAX_BIASES, MAX_BANS = 512, 64
"""Biased and banned token ids a row, at most; powers of two."""

LEAST = tl.constexpr(-(1 << 31))
"""The key of a dropped token, below that of every float."""


@dataclass(frozen=True, slots=True)
class AdjustConfig:
    """Tokens a block, warps a program, and how long a front may be that is found among candidates."""

    block: int
    warps: int
    candidates: int = 256


def choose_config(vocab: int) -> AdjustConfig:
    """From the vocabulary alone, so that a node's result does not depend on its batch."""
    block = min(max(int(triton.next_power_of_2(vocab)), 128), 4096)
    return AdjustConfig(block, max(4, block // 256))


def adjust_logits(
    logits: Tensor,
    batch: SamplingBatch,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    *,
    config: AdjustConfig | None = None,
) -> Tensor:
    """Penalised and biased logits [B, M, V] float32, -inf where a token is impossible, before temperature.

    logits [B, M, V] up to 32 bits wide; path: tokens int64 and validity bool [B, M, L], needed with
    penalties; positions [B, M] int64 of the tokens to be chosen, needed with biases. The rows' own values are
    read before the kernel launched just before has ended, so that one must not write them. AssertionError for
    other shapes, strides and dtypes.
    """
    rows, nodes, vocab = logits.shape
    assert logits.dtype != torch.float64, "float64 takes plain torch"
    assert logits.stride(2) == 1 or vocab == 1, "a node's logits must be adjacent"
    penalties, (tokens, valid) = _penalties(logits, batch, path)
    (ids, values, banned, until), positions = _biases(logits, batch, positions)
    filters = _filters(rows, batch)
    grammar = _grammar(logits, batch)
    out = torch.empty(rows, nodes, vocab, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    config = config or choose_config(vocab)
    _adjust_kernel[(rows * nodes,)](
        logits,
        out,
        grammar,
        tokens,
        valid,
        *penalties,
        ids,
        values,
        banned,
        until,
        positions,
        *filters,
        *((None,) * 3 if filters[0] is None else _scratch(out, config)),
        logits.stride(0),
        logits.stride(1),
        nodes,
        vocab,
        0 if grammar is None else grammar.shape[2],
        0 if tokens is None else tokens.shape[2],
        (0, 0, 0) if tokens is None else tokens.stride(),
        (0, 0) if positions is None else positions.stride(),
        0 if values is None else values.shape[1],
        0 if banned is None else banned.shape[1],
        0 if ids is None else ids.stride(0),
        0 if banned is None else banned.stride(0),
        LARGEST=torch.finfo(torch.float32).max,
        BLOCK=config.block,
        CANDIDATES=config.candidates,
        BITS=max((vocab - 1).bit_length(), 1),
        BIASES=MAX_BIASES,
        BANS=MAX_BANS,
        num_warps=config.warps,
        **launch_options(),
    )
    return out


def _scratch(out: Tensor, config: AdjustConfig) -> tuple[Tensor, Tensor, Tensor]:
    """What a node's filters keep in memory: keys of all its tokens; places and masses of its candidates."""
    count, vocab, device = out.shape[0] * out.shape[1], out.shape[2], out.device
    return (
        torch.empty(count, triton.cdiv(vocab, config.block) * config.block, dtype=torch.int32, device=device),
        torch.empty(count, config.candidates, dtype=torch.int64, device=device),
        torch.empty(count, config.candidates, dtype=torch.float64, device=device),
    )


def _require(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of just this dtype and shape, whose items are adjacent: the kernel takes no strides for it."""
    assert tensor.dtype == dtype, f"{name} must be {dtype}, is {tensor.dtype}"
    assert tensor.shape == shape, f"{name} must be {list(shape)}, is {list(tensor.shape)}"
    assert tensor.is_contiguous(), f"{name} must be contiguous"
    return tensor


def _penalties(
    logits: Tensor, batch: SamplingBatch, path: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, Tensor | None]]:
    """Frequency, presence, repetition, counts and what the prompt held; and the path; None without any."""
    if not batch.any_penalty:
        return (None,) * 5, (None, None)
    assert path is not None, "penalties count each node's path"
    (rows, nodes, vocab), (tokens, valid) = logits.shape, path
    length = tokens.shape[-1]
    assert tokens.shape == (rows, nodes, length), f"a path must be [{rows}, {nodes}, L]"
    assert tokens.dtype == torch.int64, f"a path's tokens must be int64, are {tokens.dtype}"
    return (
        _require("frequency", batch.frequency, torch.float32, rows),
        _require("presence", batch.presence, torch.float32, rows),
        _require("repetition", batch.repetition, torch.float32, rows),
        _require("counts", batch.counts, torch.int32, rows, vocab),
        _require("prompt_seen", batch.prompt_seen, torch.bool, rows, vocab),
    ), (tokens, _require("a path's validity", valid.contiguous(), torch.bool, rows, nodes, length))


def _biases(
    logits: Tensor, batch: SamplingBatch, positions: Tensor | None
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Biased ids, their values, banned ids, until when those are banned; and the positions; None without."""
    if not batch.any_bias:
        return (None,) * 4, None
    ids, values, banned, until = batch.bias_ids, batch.bias_values, batch.banned_ids, batch.ban_until
    assert ids is not None
    assert values is not None
    assert banned is not None
    assert until is not None
    assert positions is not None, "bans depend on the position"
    rows, nodes, _ = logits.shape
    assert positions.shape == (rows, nodes), f"positions must be [{rows}, {nodes}]"
    assert positions.dtype == torch.int64, f"positions must be int64, are {positions.dtype}"
    for name, entries, most in (("biased", ids, MAX_BIASES), ("banned", banned, MAX_BANS)):
        assert entries.dtype == torch.int64, f"{name} ids must be int64, are {entries.dtype}"
        assert entries.shape[0] == rows, f"{name} ids must be [{rows}, n]"
        assert entries.shape[1] <= most, f"at most {most} {name} ids a row, not {entries.shape[1]}"
        assert entries.stride(1) == 1, f"a row's {name} ids must be adjacent"
    values = _require("bias_values", values, torch.float32, rows, ids.shape[1])
    return (ids, values, banned, _require("ban_until", until, torch.int64, rows)), positions


def _filters(rows: int, batch: SamplingBatch) -> tuple[Tensor | None, ...]:
    """Temperature, top_k, top_p and min_p, or None where no row filters: greedy ones never do."""
    if not (batch.any_sampled and batch.any_filter):
        return (None,) * 4
    return (
        _require("temperature", batch.temperature, torch.float32, rows),
        _require("top_k", batch.top_k, torch.int64, rows),
        _require("top_p", batch.top_p, torch.float32, rows),
        _require("min_p", batch.min_p, torch.float32, rows),
    )


def _grammar(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """Each node's mask, if there is any."""
    if batch.grammar is None:
        return None
    (rows, nodes, vocab), words = logits.shape, batch.grammar.shape[-1]
    assert words * 32 >= vocab, f"masks of {words} words for {vocab} tokens"
    return _require("grammar", batch.grammar.contiguous(), torch.int32, rows, nodes, words)


@triton.jit
def penalise(  # type: ignore[no-untyped-def]
    x,
    token,
    mask,
    node,
    row,
    path_ptr,
    path_stride,
    valid_ptr,
    frequency,
    presence,
    repetition,
    counts_ptr,
    seen_ptr,
    vocab,
    length,
):
    """Repetition over prompt, output and own path, then frequency and presence over output and own path."""
    count = tl.load(counts_ptr + row * vocab + token, mask=mask, other=0)
    for step in range(length):
        written = tl.load(path_ptr + step * path_stride)
        there = tl.load(valid_ptr + node * length + step) != 0
        count += ((token == written) & there).to(tl.int32)
    seen = (count > 0) | (tl.load(seen_ptr + row * vocab + token, mask=mask, other=0) != 0)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(seen, repeated, x)
    x = x - frequency * count.to(tl.float32)
    return x - tl.where(count > 0, presence, 0.0)


@triton.jit
def add_biases(out_ptr, ids, values, banned, is_early):  # type: ignore[no-untyped-def]
    """Add a row's biases to the node's values in memory, and ban what must not come so early.

    ids, values: unused entries add -0.0 and may name any token. banned: -1 where unused.
    """
    place = out_ptr + ids
    tl.store(place, tl.load(place, mask=values != 0.0, other=0.0) + values, mask=values != 0.0)
    tl.debug_barrier()
    nothing = tl.full(banned.shape, float("-inf"), tl.float32)
    tl.store(out_ptr + banned, nothing, mask=(banned >= 0) & is_early)
    tl.debug_barrier()


@triton.jit
def key_value(key):  # type: ignore[no-untyped-def]
    """The float32 of which `order_key` made `key`; NaN for LEAST."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def key_mass(key):  # type: ignore[no-untyped-def]
    """The exponential of a key's value in float64, 0 where it is dropped."""
    return tl.where(key > LEAST, tl.exp(key_value(key).to(tl.float64)), 0.0)


@triton.jit
def place_of(key, token):  # type: ignore[no-untyped-def]
    """An integer above that of every token behind this one: the larger key first, then the lower id."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def weight_from(keys_ptr, least, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many keys are `least` or more (int32), or their mass (float64)."""
    each = tl.zeros((BLOCK,), tl.float64 if MASS else tl.int32)
    for start in range(0, vocab, BLOCK):
        key = tl.load(keys_ptr + start + tl.arange(0, BLOCK))
        if MASS:
            each += tl.where(key >= least, key_mass(key), 0.0)
        else:
            each += (key >= least).to(tl.int32)
    return tl.sum(each, axis=0)


@triton.jit
def ties_before(keys_ptr, tied, end, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens with the key `tied` have an id below `end`."""
    each = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        each += ((tl.load(keys_ptr + token) == tied) & (token < end)).to(tl.int32)
    return tl.sum(each, axis=0)


@triton.jit
def last_place(  # type: ignore[no-untyped-def]
    keys_ptr, goal, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """`place_of` the last token of the shortest front whose count or mass is `goal` or more, bit by bit."""
    one = tl.full((), 1, tl.int32)
    key = one << 31
    for step in range(32):
        candidate = key ^ (one << (31 - step))  # bit 31 is the sign: clearing it is upwards
        total = weight_from(keys_ptr, candidate, vocab, MASS, BLOCK)
        key = tl.where(total >= goal, candidate, key)
    before = weight_from(keys_ptr, key + 1, vocab, MASS, BLOCK)
    each = key_mass(key) if MASS else one
    token = one - 1
    for step in range(BITS):
        candidate = token | (one << (BITS - 1 - step))
        ahead = ties_before(keys_ptr, key, candidate, vocab, BLOCK)
        token = tl.where(before + each * ahead < goal, candidate, token)
    return place_of(key, token)


@triton.jit
def drop_behind(keys_ptr, last, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Drop the keys of tokens behind the place `last`."""
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + token)
        tl.store(keys_ptr + token, tl.where(place_of(key, token) < last, LEAST, key))
    tl.debug_barrier()


@triton.jit
def few_candidates(  # type: ignore[no-untyped-def]
    keys_ptr, lowest, count, need, vocab, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr
):
    """A key at and above which there are `need` to CANDIDATES tokens, and how many; more if none is found.

    lowest: of the `count` values, all at most 0. Scores are halved by value, not by bits: of a distribution
    the front is a few halvings away. The first ones look for few candidates, for these cost more than a pass.
    """
    low, high = lowest, lowest * 0.0
    least, number, step = tl.full((), LEAST + 1, tl.int32), count, 0
    few = tl.minimum(tl.maximum(2 * need, CANDIDATES // 2), CANDIDATES)
    while (step < 24) & ((number > few) | (number < need)):
        middle = 0.5 * low + 0.5 * high
        least = order_key(middle, middle == middle)
        number = weight_from(keys_ptr, least, vocab, False, BLOCK)
        low = tl.where(number >= need, middle, low)
        high = tl.where(number < need, middle, high)
        step += 1
        few = tl.where(step < 8, few, CANDIDATES)
    return least, number


@triton.jit
def gather_places(keys_ptr, places_ptr, least, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the places of all tokens whose key is `least` or more, in order of ids."""
    base = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + token)
        taken = (key >= least).to(tl.int32)
        target = base + tl.cumsum(taken, axis=0) - 1
        tl.store(places_ptr + target, place_of(key, token), mask=taken != 0)
        base += tl.sum(taken, axis=0)
    tl.debug_barrier()


@triton.jit
def last_candidate(  # type: ignore[no-untyped-def]
    keys_ptr,
    places_ptr,
    masses_ptr,
    number,
    count,
    limit,
    top_p,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The last place that top_k (`limit` of `count` tokens) and top_p leave, and whether it is a candidate.

    Each candidate meets every other: how many are ahead of it, and with what mass.
    """
    entry = tl.arange(0, CANDIDATES)
    there = entry < number
    place = tl.load(places_ptr + entry, mask=there, other=0)
    mass = tl.where(there, key_mass((place >> 32).to(tl.int32)), 0.0)
    tl.store(masses_ptr + entry, mass)
    tl.debug_barrier()
    rank = tl.zeros((CANDIDATES,), tl.int32)
    before = tl.zeros((CANDIDATES,), tl.float64)
    for start in range(0, number, 16):
        other = start + tl.arange(0, 16)
        others = tl.load(places_ptr + other, mask=other < number, other=-(1 << 63))
        weights = tl.load(masses_ptr + other, mask=other < number, other=0.0)
        ahead = others[:, None] > place[None, :]
        rank += tl.sum(ahead.to(tl.int32), axis=0)
        before += tl.sum(tl.where(ahead, weights[:, None], 0.0), axis=0)
    inside = there & (rank < limit)
    found = tl.sum(tl.where(inside, mass, 0.0), axis=0)
    total = found
    if (limit == count) & (number < count):  # top_k leaves everything, so the mass is that of all tokens
        total = weight_from(keys_ptr, LEAST + 1, vocab, True, BLOCK)
    # A top_p that is 0 in float32 keeps the best token, and so does any goal below its mass.
    goal = tl.where(top_p < 1.0, tl.maximum(top_p.to(tl.float64) * total, 1e-300), float("inf"))
    last = tl.min(tl.where(inside & (before < goal), place, (1 << 63) - 1), axis=0)
    return last, (found >= goal) | (number >= limit)


@triton.jit
def last_of_front(  # type: ignore[no-untyped-def]
    keys_ptr, limit, count, top_p, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """What `last_candidate` finds, for fronts of any length; drops what top_k does not leave."""
    last = tl.full((), LEAST + 1, tl.int64) << 32
    if limit < count:
        last = last_place(keys_ptr, limit, vocab, False, BLOCK, BITS)
        drop_behind(keys_ptr, last, vocab, BLOCK)
    if top_p < 1.0:
        total = weight_from(keys_ptr, LEAST + 1, vocab, True, BLOCK)
        goal = tl.maximum(top_p.to(tl.float64) * total, 1e-300)
        last = last_place(keys_ptr, goal, vocab, True, BLOCK, BITS)
    return last


@triton.jit
def filter_node(  # type: ignore[no-untyped-def]
    out_ptr,
    keys_ptr,
    places_ptr,
    masses_ptr,
    top,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Put -inf where min_p, top_k and top_p remove a token; see the twin's `_filter`."""
    logarithm = tl.log(tl.maximum(min_p.to(tl.float64), 1e-300)).to(tl.float32)
    floor = tl.where(min_p > 0, logarithm, float("-inf"))
    live = tl.zeros((BLOCK,), tl.int32)
    low = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(out_ptr + token, mask=token < vocab, other=float("-inf"))
        t = temper(x, top, temperature)
        stays = (t >= floor) & (t > float("-inf"))
        tl.store(keys_ptr + token, order_key(t, stays))
        live += stays.to(tl.int32)
        low = tl.minimum(low, tl.where(stays, t, 0.0))
    tl.debug_barrier()
    count = tl.sum(live, axis=0)
    limit = tl.where((top_k > 0) & (top_k < count), top_k, count).to(tl.int32)
    last = tl.full((), LEAST + 1, tl.int64) << 32
    if (limit < count) | (top_p < 1.0):
        among = tl.full((), 0, tl.int1)
        if (limit <= CANDIDATES) | (limit == count):
            need = tl.where(limit < count, limit, tl.minimum(count, CANDIDATES // 4))
            lowest = tl.min(low, axis=0)
            least, number = few_candidates(keys_ptr, lowest, count, need, vocab, BLOCK, CANDIDATES)
            if (number >= need) & (number <= CANDIDATES):
                gather_places(keys_ptr, places_ptr, least, vocab, BLOCK)
                last, among = last_candidate(
                    keys_ptr, places_ptr, masses_ptr, number, count, limit, top_p, vocab, BLOCK, CANDIDATES
                )
        if among == 0:
            last = last_of_front(keys_ptr, limit, count, top_p, vocab, BLOCK, BITS)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        gone = (place_of(tl.load(keys_ptr + token), token) < last) & (token < vocab)
        tl.store(out_ptr + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=gone)


@triton.jit
def _adjust_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    out_ptr,
    grammar_ptr,
    path_ptr,
    valid_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    counts_ptr,
    seen_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    banned_ids_ptr,
    ban_until_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    places_ptr,
    masses_ptr,
    row_stride,
    node_stride,
    nodes,
    vocab,
    words,
    length,
    path_strides,
    position_strides,
    biases,
    bans,
    bias_stride,
    ban_stride,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BITS: tl.constexpr,
    BIASES: tl.constexpr,
    BANS: tl.constexpr,
    PDL: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    out_ptr += node * vocab
    source = logits_ptr + row * row_stride + (node % nodes) * node_stride
    # The rows' own values were gathered when the step began, long before the logits.
    if counts_ptr is not None:
        frequency = tl.load(frequency_ptr + row, cache_modifier=EARLY)
        presence = tl.load(presence_ptr + row, cache_modifier=EARLY)
        repetition = tl.load(repetition_ptr + row, cache_modifier=EARLY)
        path_ptr += row * path_strides[0] + node % nodes * path_strides[1]
        if PDL:
            for start in range(0, vocab, BLOCK):
                wanted = tl.minimum(start + 8 * tl.arange(0, BLOCK // 8), vocab - 1)  # a sector each
                prefetch(counts_ptr + row * vocab + wanted)
                wanted = tl.minimum(start + 32 * tl.arange(0, BLOCK // 32), vocab - 1)
                prefetch(seen_ptr + row * vocab + wanted)
    if bias_ids_ptr is not None:
        entry, number = tl.arange(0, BIASES), tl.arange(0, BANS)
        used, banned_ptr = entry < biases, banned_ids_ptr + row * ban_stride + number
        ids = tl.load(bias_ids_ptr + row * bias_stride + entry, mask=used, other=0, cache_modifier=EARLY)
        values_ptr = bias_values_ptr + row * biases + entry
        values = tl.load(values_ptr, mask=used, other=0.0, cache_modifier=EARLY)
        banned = tl.load(banned_ptr, mask=number < bans, other=-1, cache_modifier=EARLY)
        until = tl.load(ban_until_ptr + row, cache_modifier=EARLY)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row, cache_modifier=EARLY)
        top_k = tl.load(top_k_ptr + row, cache_modifier=EARLY)
        top_p = tl.load(top_p_ptr + row, cache_modifier=EARLY)
        min_p = tl.load(min_p_ptr + row, cache_modifier=EARLY)
    wait_for_inputs(PDL)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < vocab
        x = tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)
        if grammar_ptr is not None:
            word = tl.load(grammar_ptr + node * words + token // 32, mask=mask, other=0)
            x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
        if counts_ptr is not None:
            x = penalise(
                x, token, mask, node, row, path_ptr, path_strides[2], valid_ptr, frequency, presence,
                repetition, counts_ptr, seen_ptr, vocab, length,
            )  # fmt: skip
        x = finite(x, LARGEST)  # a bias changes nothing in that
        top = tl.maximum(top, x)
        tl.store(out_ptr + token, x, mask=mask)
    tl.debug_barrier()  # what a thread reads from here on another may have written
    if bias_ids_ptr is not None:
        position = tl.load(positions_ptr + row * position_strides[0] + node % nodes * position_strides[1])
        add_biases(out_ptr, ids, values, banned, position < until)
        if temperature_ptr is not None:
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                top = tl.maximum(top, tl.load(out_ptr + token, mask=token < vocab, other=float("-inf")))
    if temperature_ptr is not None:  # noqa: SIM102 - known when compiling
        if temperature > 0:
            padded = tl.cdiv(vocab, BLOCK) * BLOCK
            filter_node(
                out_ptr, keys_ptr + node * padded, places_ptr + node * CANDIDATES,
                masses_ptr + node * CANDIDATES, tl.max(top, axis=0), temperature, top_k, top_p, min_p, vocab,
                BLOCK, CANDIDATES, BITS,
            )  # fmt: skip
