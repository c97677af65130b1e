"""What comes between logits and the choice, one launch: grammar, penalties, biases, bans and filters.

One program holds a node's whole vocabulary in registers. The filters need no sort: a descent over the bits of
the ordered logits finds the last value of the front that top_k or top_p keeps, and one over the bits of token
ids the last of equal values. The result is logits again, -inf where a token is impossible, for the kernels of
vocab.py. Twin: `adjust_logits` in kernels/ref/sampling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.kernels.launch import launch_options, wait_for_inputs
from nextn.kernels.ref.sampling import SamplingBatch
from nextn.kernels.tree_ops import drop_key, order_key
from nextn.kernels.vocab import temper

MAX_VOCAB = 16384
"""A longer vocabulary does not fit a program's registers; it takes plain torch."""


def choose_config(vocab: int) -> tuple[int, int]:
    """Tokens of the block and warps a program, from the vocabulary alone."""
    block = max(int(triton.next_power_of_2(vocab)), 128)
    return block, max(4, min(16, block // 1024))


def adjust_logits(
    logits: Tensor,
    batch: SamplingBatch,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    *,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """Penalised and biased logits [B, M, V] float32, -inf where a token is impossible, before temperature.

    logits [B, M, V] up to 32 bits wide, V <= 16384; path: tokens int64 and validity bool [B, M, L], needed
    with penalties; positions [B, M] int64 of the tokens to be chosen, needed with biases. config: (block,
    warps).
    """
    rows, nodes, vocab = logits.shape
    assert logits.dtype != torch.float64, "float64 takes plain torch"
    assert vocab <= MAX_VOCAB, f"a vocabulary of {vocab} is above the {MAX_VOCAB} of this kernel"
    assert logits.stride(2) == 1 or vocab == 1, "a node's logits must be adjacent"
    assert path is not None or not batch.any_penalty, "penalties count each node's path"
    assert positions is not None or not batch.any_bias, "bans depend on the position"
    out = torch.empty(rows, nodes, vocab, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    grammar, tokens, valid = batch.grammar, None, None
    if grammar is not None:
        assert grammar.shape[:2] == (rows, nodes), f"masks are {tuple(grammar.shape)} for {rows} x {nodes}"
        assert grammar.shape[2] * 32 >= vocab, f"masks of {grammar.shape[2]} words for {vocab} tokens"
        grammar = grammar.contiguous()
    if batch.any_penalty and path is not None:
        tokens, valid = (each.contiguous() for each in path)
    sampled = batch.any_sampled and batch.any_filter
    penalties = (batch.frequency, batch.presence, batch.repetition, batch.counts, batch.prompt_seen)
    biases = (batch.bias_ids, batch.bias_values, batch.banned_ids, batch.ban_until)
    filters = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    block, warps = config or choose_config(vocab)
    _adjust_kernel[(rows * nodes,)](
        logits,
        out,
        grammar,
        tokens,
        valid,
        *(each.contiguous() if batch.any_penalty else None for each in penalties),
        *(each.contiguous() if each is not None and batch.any_bias else None for each in biases),
        positions.contiguous() if positions is not None and batch.any_bias else None,
        *(each.contiguous() if sampled else None for each in filters),
        torch.empty(rows * nodes, block, dtype=torch.int32, device=logits.device) if sampled else None,
        torch.empty(rows * nodes, block, dtype=torch.float64, device=logits.device) if sampled else None,
        logits.stride(0),
        logits.stride(1),
        nodes,
        vocab,
        0 if grammar is None else grammar.shape[2],
        0 if tokens is None else tokens.shape[2],
        0 if not batch.any_bias or batch.bias_ids is None else batch.bias_ids.shape[1],
        0 if not batch.any_bias or batch.banned_ids is None else batch.banned_ids.shape[1],
        LARGEST=torch.finfo(torch.float32).max,
        BLOCK=block,
        PIECE=min(block, 128 * warps),
        BIASES=512,
        BANS=64,
        num_warps=warps,
        **launch_options(),
    )
    return out


@triton.jit
def penalise(  # type: ignore[no-untyped-def]
    x,
    token,
    mask,
    node,
    row,
    path_ptr,
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
        written = tl.load(path_ptr + node * length + step)
        there = tl.load(valid_ptr + node * length + step) != 0
        count += ((token == written) & there).to(tl.int32)
    seen = (count > 0) | (tl.load(seen_ptr + row * vocab + token, mask=mask, other=0) != 0)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(seen, repeated, x)
    x = x - frequency * count.to(tl.float32)
    return x - tl.where(count > 0, presence, 0.0)


@triton.jit
def last_key(key, weight, least):  # type: ignore[no-untyped-def]
    """The largest key at and above which the weights sum to `least` or more; int32 keys, bit by bit."""
    one = tl.full((), 1, tl.int32)
    found = one << 31
    for step in range(32):
        candidate = found ^ (one << (31 - step))  # bit 31 is the sign: clearing it is upwards
        total = tl.sum(tl.where(key >= candidate, weight, tl.zeros_like(weight)), axis=0)
        found = tl.where(total >= least, candidate, found)
    return found


@triton.jit
def last_token(tied, token, before, each, least, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of tied tokens in order of ids, the last one ahead of which before + each * ties is below `least`.

    The first one always is, so a single one needs no search.
    """
    one = tl.full((), 1, tl.int32)
    found = tl.full((), (1 << BITS) - 1, tl.int32)
    if tl.sum(tied.to(tl.int32), axis=0) > 1:
        found = one - 1
        for step in range(BITS):
            candidate = found | (one << (BITS - 1 - step))
            ahead = tl.sum((tied & (token < candidate)).to(tl.int32), axis=0)
            found = tl.where(before + each * ahead < least, candidate, found)
    return found


@triton.jit
def key_value(key):  # type: ignore[no-untyped-def]
    """The float32 of which `order_key` made `key`; NaN for the least key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def drop_behind(key, token, cut, last):  # type: ignore[no-untyped-def]
    """Drop the keys behind a front that ends with `cut`, and there with the token `last`."""
    return drop_key(key, (key < cut) | ((key == cut) & (token > last)))


@triton.jit
def filter_keys(  # type: ignore[no-untyped-def]
    key, token, top_k, top_p, min_p, vocab, keys_ptr, masses_ptr, BLOCK: tl.constexpr, PIECE: tl.constexpr
):
    """Drop the keys of tokens that min_p, top_k and top_p remove; see the twin's `_filter`.

    key: of tempered logits, at most 0. A dropped key is the least integer, which no float has. What is kept
    is held in the keys alone: registers are short.
    """
    least: tl.constexpr = -(1 << 31)
    BITS: tl.constexpr = BLOCK.bit_length() - 1
    if (top_k > 0) & (top_k < vocab):
        count = top_k.to(tl.int32)
        cut = last_key(key, tl.full(key.shape, 1, tl.int32), count)
        above = tl.sum((key > cut).to(tl.int32), axis=0)
        key = drop_behind(key, token, cut, last_token(key == cut, token, above, 1, count, BITS))
    if min_p > 0:
        floor = tl.log(min_p.to(tl.float64)).to(tl.float32)
        key = drop_key(key, (key_value(key) >= floor) == 0)
    if top_p < 1.0:
        tl.store(keys_ptr + token, key)
        tl.debug_barrier()
        for start in range(0, BLOCK, PIECE):  # all at once would take too many registers
            place = start + tl.arange(0, PIECE)
            part = tl.load(keys_ptr + place)
            weight = tl.where(part > least, tl.exp(key_value(part).to(tl.float64)), 0.0)
            tl.store(masses_ptr + place, weight)
        tl.debug_barrier()
        key, mass = tl.load(keys_ptr + token), tl.load(masses_ptr + token)
        # A top_p that is 0 in float32 keeps the best token, and so does any goal below its mass.
        goal = tl.maximum(top_p.to(tl.float64) * tl.sum(mass, axis=0), 1e-300)
        cut = last_key(key, mass, goal)
        above_mass = tl.sum(tl.where(key > cut, mass, 0.0), axis=0)
        each = tl.max(tl.where(key == cut, mass, 0.0), axis=0)
        key = drop_behind(key, token, cut, last_token(key == cut, token, above_mass, each, goal, BITS))
    return key


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
    masses_ptr,
    row_stride,
    node_stride,
    nodes,
    vocab,
    words,
    length,
    biases,
    bans,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    BIASES: tl.constexpr,
    BANS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    token = tl.arange(0, BLOCK)
    mask = token < vocab
    out_ptr += node * vocab
    source = logits_ptr + row * row_stride + (node % nodes) * node_stride
    x = tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)
    if grammar_ptr is not None:
        word = tl.load(grammar_ptr + node * words + token // 32, mask=mask, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    if counts_ptr is not None:
        frequency, presence = tl.load(frequency_ptr + row), tl.load(presence_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        x = penalise(
            x, token, mask, node, row, path_ptr, valid_ptr, frequency, presence, repetition, counts_ptr,
            seen_ptr, vocab, length,
        )  # fmt: skip
    # Through memory: other threads hold the tokens that a bias names, and fewer registers are then taken.
    tl.store(out_ptr + token, x, mask=mask)
    tl.debug_barrier()
    if bias_ids_ptr is not None:  # entries that add nothing may name any token
        entry = tl.arange(0, BIASES)
        bias = tl.load(bias_values_ptr + row * biases + entry, mask=entry < biases, other=0.0)
        place = out_ptr + tl.load(bias_ids_ptr + row * biases + entry, mask=entry < biases, other=0)
        tl.store(place, tl.load(place, mask=bias != 0.0, other=0.0) + bias, mask=bias != 0.0)
        tl.debug_barrier()
        early = tl.load(positions_ptr + node) < tl.load(ban_until_ptr + row)
        number = tl.arange(0, BANS)
        banned = tl.load(banned_ids_ptr + row * bans + number, mask=number < bans, other=-1)
        tl.store(out_ptr + banned, tl.full((BANS,), float("-inf"), tl.float32), mask=(banned >= 0) & early)
        tl.debug_barrier()
    x = tl.load(out_ptr + token, mask=mask, other=float("-inf"))
    x = tl.where(x == x, tl.where(x > LARGEST, LARGEST, x), float("-inf"))
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            t = temper(x, tl.max(x, axis=0), temperature)
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            tl.store(out_ptr + token, x, mask=mask)
            tl.debug_barrier()  # the threads that drop tokens below need not be those that stored them
            key = filter_keys(
                order_key(t, mask), token, top_k, top_p, min_p, vocab,
                keys_ptr + node * BLOCK, masses_ptr + node * BLOCK, BLOCK, PIECE,
            )  # fmt: skip
            gone = mask & (key == -(1 << 31))
            tl.store(out_ptr + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=gone)
        else:
            tl.store(out_ptr + token, x, mask=mask)
    else:
        tl.store(out_ptr + token, x, mask=mask)
