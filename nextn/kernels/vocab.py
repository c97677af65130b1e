"""What is chosen from logits over the vocabulary, two launches an op; twins in kernels/ref/sampling.py.

The first launch reads each node's logits once, in chunks of the vocabulary, and leaves every chunk's best
tokens and the sum of its exponentials; the second merges a node's chunks. Within a chunk tokens are ranked by
(logit - the chunk's maximum) / T + noise, in the end by the same from the node's maximum, so a small T
overflows nowhere. Chunks depend on the vocabulary alone: a node's result does not depend on its batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextn.errors import ConfigError
from nextn.kernels.launch import launch_options, wait_for_inputs
from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.sampling import MAX_CHILDREN, MAX_LOGPROBS, SamplingBatch, pad_logprobs
from nextn.kernels.tree_ops import drop_key, order_key, take_best

NOISE_BLOCK = 1024  # tokens a program


def choose_config(vocab: int) -> tuple[int, int]:
    """Tokens a chunk and warps a program; from the vocabulary alone, see the top of this file."""
    return (512, 4) if vocab <= 32768 else (1024, 4)


def best_children(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor | None,
    k: int,
    tau: float = 1.0,
    *,
    config: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best next tokens of each draft node and their values: tokens [B, M, k] int64, values [B, M, k].

    logits [B, M, V]; noise [B, 1, V or 1] of the position that they are chosen for, of logits' accumulation
    dtype like the values; None ranks by the distribution alone. For batches that adjust no logits,
    k <= 64. config: (tokens a chunk, warps).
    """
    vocab = logits.shape[2]
    if k > vocab:
        raise ConfigError(f"--topk {k} is above the vocabulary of {vocab}; use {vocab} or less")
    assert 1 <= k <= MAX_CHILDREN, f"k is {k}, the kernel keeps 1 to {MAX_CHILDREN}"
    assert tau > 0, f"tau must be above 0, is {tau}"
    assert noise is None or noise.shape[1] == 1, "all nodes choose for one position"
    return _choose(logits, batch, noise, None, k, tau, config)


def pick_tokens(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor,
    level: Tensor,
    *,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """The token of each node [B, M] int64, `NO_TOKEN` where it has no finite logit; ties to the lower id.

    logits [B, M, V]; noise [B, levels, V or 1] of logits' accumulation dtype, of which node m takes
    noise[row, level[row, m]]; level [B, M] int64. For batches that adjust no logits.
    """
    assert level.shape == logits.shape[:2], (
        f"level must be {tuple(logits.shape[:2])}, is {tuple(level.shape)}"
    )
    assert level.dtype == torch.int64, f"level must be int64, is {level.dtype}"
    tokens, _ = _choose(logits, batch, noise, level.contiguous(), 1, 1.0, config)
    return tokens.squeeze(-1)


def chosen_logprobs(
    logits: Tensor, adjusted: Tensor, batch: SamplingBatch, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens` [B, M] and of the best in their places: values and ids [B, M, 1 + 20].

    logits [B, M, V] of up to 32 bits and what `adjust_logits` makes of them; rows with `raw_logprobs` get
    the model's own. A token's value is found from the best one's and from how far it lies below.
    """
    assert batch.raw_logprobs is not None, "log-probabilities need to know which rows want raw ones"
    x, temperature = adjusted, torch.zeros_like(batch.raw_logprobs, dtype=torch.float32)
    if adjusted is not logits:
        x = torch.where(batch.raw_logprobs[:, None, None], logits, adjusted)
    if batch.any_sampled:
        temperature = torch.where(batch.raw_logprobs, 0.0, batch.temperature)
    batch = replace(batch.adjusted(), temperature=temperature)
    best, values = best_children(x, batch, None, min(MAX_LOGPROBS, x.shape[2]))
    places = torch.cat((tokens.clamp(min=0).unsqueeze(-1), best[..., :1]), dim=-1)
    found = x.gather(-1, places).float().clamp(max=torch.finfo(torch.float32).max)  # as `finite`; NaN stays
    own, top = found.split(1, dim=-1)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    own = torch.addcdiv(values[..., :1], own - top, divisor)
    own = torch.nan_to_num(own, nan=-math.inf, neginf=-math.inf)
    return pad_logprobs(tokens, own, best, values)


def level_noise(batch: SamplingBatch, first: Tensor, levels: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Noise of `levels` consecutive positions from `first` [B] int64 on, [B, levels, V]; 0 where T = 0.

    Without sampled rows [B, levels, 1] of zeros. Equal to the twin's up to two float64 logarithms.
    """
    rows = first.shape[0]
    if not batch.any_sampled:
        return torch.zeros(rows, levels, 1, dtype=dtype, device=first.device)
    assert batch.temperature.shape == (rows,), f"temperature must be [{rows}]"
    for name, key in (("first", first), ("seed", batch.seed), ("choice", batch.choice)):
        assert key.dtype == torch.int64, f"{name} must be int64, is {key.dtype}"
        assert key.shape == (rows,), f"{name} must be [{rows}], is {list(key.shape)}"
    noise = torch.empty(rows, levels, vocab, dtype=dtype, device=first.device)
    if noise.numel():
        _noise_kernel[(rows * levels, triton.cdiv(vocab, NOISE_BLOCK))](
            batch.temperature.contiguous(),
            batch.seed.contiguous(),
            batch.choice.contiguous(),
            first.contiguous(),
            noise,
            levels,
            vocab,
            BLOCK=NOISE_BLOCK,
            **launch_options(),
        )
    return noise


def _choose(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor | None,
    level: Tensor | None,
    k: int,
    tau: float,
    config: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """Both launches; `level` tells that tokens are picked, without it children are ranked and valued."""
    rows, nodes, vocab = logits.shape
    wide = accumulation_dtype(logits.dtype)
    assert not batch.adjusts_logits, "filters, penalties, biases and grammars need `adjust_logits`"
    assert logits.stride(2) == 1 or vocab == 1, "a node's logits must be adjacent"
    assert not batch.any_sampled or batch.temperature.shape == (rows,), f"temperature must be [{rows}]"
    noise = noise if batch.any_sampled else None
    tau = 1.0 if noise is None else tau  # it sharpens noisy scores only
    if noise is not None:
        assert noise.shape[::2] == (rows, vocab), f"noise is {tuple(noise.shape)} for {rows} rows of {vocab}"
        assert noise.dtype == wide, f"noise must be {wide}, is {noise.dtype}"
        assert noise.stride(2) == 1 or vocab == 1, "a level's noise must be adjacent"
    block, warps = config or choose_config(vocab)
    chunks, count = triton.cdiv(vocab, block), rows * nodes
    kept = min(k, block)
    sums = logits.new_empty(3, count, chunks, dtype=wide)  # maximum; its noisy peak and sum of exponentials
    near = torch.empty(count, chunks, kept, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, nodes, k, dtype=torch.int64, device=logits.device)
    values = logits.new_empty(rows, nodes, k, dtype=wide)
    if count == 0:
        return tokens, values
    inputs = (
        logits,
        batch.temperature.contiguous() if batch.any_sampled else None,
        noise,
        level,
        *sums,
        near,
        logits.stride(0),
        logits.stride(1),
        0 if noise is None else noise.stride(0),
        0 if noise is None else noise.stride(1),
        nodes,
        vocab,
        chunks,
    )
    constants = {
        "KEPT": kept,
        "SLOTS": triton.next_power_of_2(k),
        "LARGEST": torch.finfo(wide).max,
        "TAU": tau,
        "PICK": level is not None,
        **launch_options(),
    }
    _chunk_kernel[(count, chunks)](*inputs, BLOCK=block, num_warps=warps, **constants)
    candidates = triton.next_power_of_2(chunks * kept)
    _merge_kernel[(count,)](
        *inputs,
        tokens,
        values,
        K=k,
        CHUNKS=triton.next_power_of_2(chunks),
        CANDIDATES=candidates,
        num_warps=1 if candidates <= 256 else 4 if candidates <= 2048 else 8,
        **constants,
    )
    return tokens, values


@triton.jit
def finite(x, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """NaN as -inf and inf as the largest float."""
    return tl.where(x == x, tl.where(x > LARGEST, LARGEST, x), float("-inf"))


@triton.jit
def load_logits(pointer, mask, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """`finite` logits, in float32 at least."""
    x = tl.load(pointer, mask=mask, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return finite(x, LARGEST)


@triton.jit
def row_temperature(temperature_ptr, row):  # type: ignore[no-untyped-def]
    """T of a row, 0 where no row samples."""
    if temperature_ptr is None:
        return 0.0
    else:
        return tl.load(temperature_ptr + row)


@triton.jit
def finite_or_zero(maximum):  # type: ignore[no-untyped-def]
    """What to subtract for a maximum that may be -inf."""
    return tl.where(maximum > float("-inf"), maximum, 0.0)


@triton.jit
def temper(x, top, temperature):  # type: ignore[no-untyped-def]
    """(x - top) / T with T = 1 in greedy rows; `top` -inf counts as 0."""
    shifted = x - finite_or_zero(top)
    scale = tl.where(temperature > 0, temperature, 1.0).to(x.dtype)
    if x.dtype == tl.float32:
        return tl.div_rn(shifted, tl.zeros_like(shifted) + scale)
    else:
        return shifted / scale


@triton.jit
def row_noise(noise_ptr, level_ptr, temperature, node, nodes, row_stride, level_stride, token, mask):  # type: ignore[no-untyped-def]
    """A node's noise at tokens, 0 in greedy rows and where there is none."""
    if noise_ptr is None:
        return tl.zeros(token.shape, tl.float32)
    else:
        source = noise_ptr + (node // nodes) * row_stride + token
        if level_ptr is not None:
            source += tl.load(level_ptr + node) * level_stride
        return tl.load(source, mask=mask & (temperature > 0), other=0.0)


@triton.jit
def sharpen(score, temperature, TAU: tl.constexpr):  # type: ignore[no-untyped-def]
    """score / tau in rows with T > 0."""
    if TAU == 1.0:
        return score
    else:
        return tl.where(temperature > 0, score / TAU, score)


@triton.jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    noise_ptr,
    level_ptr,
    tops_ptr,
    peaks_ptr,
    totals_ptr,
    near_ptr,
    row_stride,
    node_stride,
    noise_row_stride,
    noise_level_stride,
    nodes,
    vocab,
    chunks,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
    LARGEST: tl.constexpr,
    TAU: tl.constexpr,
    PICK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    node = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    first = chunk * BLOCK
    valid = place < vocab - first
    logits_ptr += (node // nodes) * row_stride + (node % nodes) * node_stride
    temperature = row_temperature(temperature_ptr, node // nodes)
    token = first + place
    x = load_logits(logits_ptr + token, valid, LARGEST)
    noise = row_noise(
        noise_ptr, level_ptr, temperature, node, nodes, noise_row_stride, noise_level_stride, token, valid
    )
    top = tl.max(x, axis=0)
    score = temper(x, top, temperature) + noise

    slot = tl.arange(0, SLOTS)
    best = take_best(order_key(score, valid), place, KEPT, SLOTS)
    near = tl.where(slot < vocab - first, first + best, 0x7FFFFFFF)
    out = node * chunks + chunk
    tl.store(near_ptr + out * KEPT + slot, near, mask=slot < KEPT)
    tl.store(tops_ptr + out, top)
    if not PICK:
        weight = sharpen(score, temperature, TAU)
        peak = tl.max(weight, axis=0)
        total = tl.sum(tl.exp(weight - finite_or_zero(peak)), axis=0)
        tl.store(peaks_ptr + out, peak)
        tl.store(totals_ptr + out, total)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    noise_ptr,
    level_ptr,
    tops_ptr,
    peaks_ptr,
    totals_ptr,
    near_ptr,
    row_stride,
    node_stride,
    noise_row_stride,
    noise_level_stride,
    nodes,
    vocab,
    chunks,
    tokens_ptr,
    values_ptr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
    LARGEST: tl.constexpr,
    TAU: tl.constexpr,
    PICK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    node = tl.program_id(0).to(tl.int64)
    logits_ptr += (node // nodes) * row_stride + (node % nodes) * node_stride
    temperature = row_temperature(temperature_ptr, node // nodes)
    chunk = tl.arange(0, CHUNKS)
    part = node * chunks + chunk
    tops = tl.load(tops_ptr + part, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(tops, axis=0)

    place = tl.arange(0, CANDIDATES)
    kept = chunks * KEPT
    token = tl.load(near_ptr + node * kept + place, mask=place < kept, other=0x7FFFFFFF)
    valid = token < vocab
    x = load_logits(logits_ptr + token, valid, LARGEST)
    noise = row_noise(
        noise_ptr, level_ptr, temperature, node, nodes, noise_row_stride, noise_level_stride, token, valid
    )
    key = order_key(temper(x, top, temperature) + noise, valid)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros((SLOTS,), tl.int32)
    for rank in range(K):
        high = tl.max(key, axis=0)
        winner = tl.min(tl.where(key == high, token, 0x7FFFFFFF), axis=0)  # ties to the lower id
        best = tl.where(slot == rank, winner, best)
        key = drop_key(key, token == winner)

    keep = slot < K
    if PICK:
        chosen = tl.where(top > float("-inf"), best, -1)  # NO_TOKEN
        tl.store(tokens_ptr + node * K + slot, chosen.to(tl.int64), mask=keep)
    else:
        tl.store(tokens_ptr + node * K + slot, best.to(tl.int64), mask=keep)
        shift = sharpen(temper(tops, top, temperature), temperature, TAU)
        peaks = shift + tl.load(peaks_ptr + part, mask=chunk < chunks, other=float("-inf"))
        totals = tl.load(totals_ptr + part, mask=chunk < chunks, other=0.0)
        peak = finite_or_zero(tl.max(peaks, axis=0))
        total = tl.sum(totals * tl.exp(peaks - peak), axis=0)
        x = load_logits(logits_ptr + best, keep, LARGEST)
        noise = row_noise(
            noise_ptr, level_ptr, temperature, node, nodes, noise_row_stride, noise_level_stride, best, keep
        )
        weight = sharpen(temper(x, top, temperature) + noise, temperature, TAU)
        total = tl.where(total > 0, total, 1.0)  # 0 where no logit is finite, then every weight is -inf
        value = weight - peak - tl.log(total.to(tl.float64)).to(weight.dtype)
        value = tl.where(weight > float("-inf"), tl.where(value > 0.0, 0.0, value), float("-inf"))
        tl.store(values_ptr + node * K + slot, value, mask=keep)


@triton.jit
def gumbel(seed, position, choice, token):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise in float64 at a block of tokens, the other three being scalars."""
    zero = (token * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(
        seed, token.to(tl.uint32), zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero
    )
    u = tl.minimum((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # 1 - u is exact in float64 (u has 33 bits), so log needs no log1p; in float32 small u would be lost.
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def _noise_kernel(  # type: ignore[no-untyped-def]
    temperature_ptr,
    seed_ptr,
    choice_ptr,
    first_ptr,
    out_ptr,
    levels,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    entry = tl.program_id(0).to(tl.int64)
    row = entry // levels
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = tl.zeros((BLOCK,), tl.float64)
    if tl.load(temperature_ptr + row) > 0:
        position = tl.load(first_ptr + row) + entry % levels
        noise = gumbel(tl.load(seed_ptr + row), position, tl.load(choice_ptr + row), token)
    tl.store(out_ptr + entry * vocab + token, noise.to(out_ptr.dtype.element_ty), mask=token < vocab)
