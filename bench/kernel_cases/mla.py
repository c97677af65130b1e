"""Cache entries and absorbed queries at DeepSeek-V3's sizes, for 16 heads (one of eight ranks) and all 128.

Summands stay in the L2, where the product before leaves them; the absorbing weights rotate through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import mla
from nextn.kernels.ref import mla as ref
from nextn.kernels.ref.rope import RotaryTables, plain_frequencies, rope_table
from tests.compare import assert_close

Q_LORA, KV_LORA, ROPE, NOPE, V = 1536, 512, 64, 128, 128
LATENT, EPS, PAGE, SETS = KV_LORA + ROPE, 1e-6, 64, 6
ROTATED_BYTES = 150 << 20  # past the L2


def cases() -> list[Case]:
    """Decode sizes, and the entries of a prefill."""
    entries = [(1, 14), (4, 14), (16, 14), (64, 7), (8192, 1)]
    queries = [(16, 1, 4), (16, 4, 4), (16, 64, 4), (128, 4, 2), (128, 64, 2)]
    return [*(_prepare(*sizes) for sizes in entries), *(_absorb(*sizes) for sizes in queries)]


def _calls(sets: list[tuple[Any, ...]], op: Callable[..., object], **how: Any) -> Callable[[], object]:
    """`op` over the input sets in turn."""
    turn: Iterator[tuple[Any, ...]] = cycle(sets)
    return lambda: op(*next(turn), **how)


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def _rotary(device: torch.device) -> RotaryTables:
    frequencies = plain_frequencies(ROPE, 1e4)
    return RotaryTables(*rope_table(frequencies, 1.0, 8192, dtype=torch.bfloat16, device=device), True)


def _prepare(count: int, parts: int) -> Case:
    def make(device: torch.device) -> Runner:
        norms = [_normal(device, size).bfloat16() for size in (Q_LORA, KV_LORA)]
        where = torch.arange(count, device=device)
        valid = torch.ones_like(where, dtype=torch.bool)
        rest = (*norms, EPS, _rotary(device), where, where, valid)

        def entries() -> tuple[Tensor, Tensor]:
            cache = torch.zeros(-(-count // PAGE), PAGE, LATENT, dtype=torch.bfloat16, device=device)
            return cache, cache.new_zeros(1, count, LATENT)

        rows = Q_LORA + LATENT
        sets = [(_normal(device, parts, count, rows), *rest, *entries()) for _ in range(SETS)]

        def check() -> None:
            cache, tail = entries()
            expected = ref.prepare_latents(*sets[0][:-2], cache, tail)
            actual = mla.prepare_latents(*sets[0])
            assert actual is not None
            assert expected is not None
            assert_close(actual, expected, "bf16-op", what="q_in")
            assert_close(sets[0][-2], cache, "bf16-op", what="cache")
            assert_close(sets[0][-1], tail, "bf16-op", what="tail")

        configs = {f"warps {warps}": mla.LatentConfig(warps) for warps in (2, 4, 8, 16)}
        candidates = {
            label: _calls(sets, mla.prepare_latents, config=each) for label, each in configs.items()
        }
        return Runner(_calls(sets, mla.prepare_latents), check, candidates)

    moved = count * (4 * parts * (Q_LORA + LATENT) + 2 * (Q_LORA + 2 * LATENT))
    flops = count * (parts + 4) * (Q_LORA + LATENT)
    return Case(f"prepare_latents {parts}x{count}", moved, flops, make)


def _absorb(heads: int, count: int, parts: int) -> Case:
    weight_bytes, width = 2 * heads * NOPE * KV_LORA, heads * (NOPE + ROPE)

    def make(device: torch.device) -> Runner:
        positions, rotary = torch.arange(count, device=device), _rotary(device)
        sets = [
            (
                _normal(device, parts, count, width),
                _normal(device, heads, NOPE + V, KV_LORA).bfloat16()[:, :NOPE],
                rotary,
                positions,
            )
            for _ in range(1 + ROTATED_BYTES // weight_bytes)
        ]

        def check() -> None:
            assert_close(mla.absorb_queries(*sets[0]), ref.absorb_queries(*sets[0]), "bf16-op")

        configs = [
            mla.AbsorbConfig(tokens, columns, warps)
            for tokens in (16, 32, 64)
            for columns in (32, 64, 128, 256)
            for warps in (4, 8)
            if tokens == 16 or tokens < 2 * count
        ]
        candidates = {
            f"tokens {each.tokens} columns {each.columns} warps {each.warps}": _calls(
                sets, mla.absorb_queries, config=each
            )
            for each in configs
        }
        return Runner(_calls(sets, mla.absorb_queries), check, candidates)

    moved = weight_bytes + count * (4 * parts * width + 2 * heads * LATENT)
    return Case(f"absorb {parts}x{count} heads {heads}", moved, 2 * count * heads * NOPE * KV_LORA, make)
