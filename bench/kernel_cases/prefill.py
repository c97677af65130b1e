"""Prefill attention of one rank of eight of DeepSeek-V3: chunks of a long prompt, and prompts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels.prefill import PrefillConfig, PrefillSizes, plan_prefill_attention, prefill_attention
from nextn.kernels.ref.attention import prefill_attention as twin
from tests.compare import assert_close

HEADS, NOPE, ROPE, V, LORA, PAGE = 16, 128, 64, 128, 512, 64
SIZES = PrefillSizes(HEADS, NOPE, V, LORA + ROPE)
SCALE = (NOPE + ROPE) ** -0.5
SETS = 4  # layers whose caches and weights take turns

CANDIDATES = (
    PrefillConfig(128, 128, 8, 2, True),
    PrefillConfig(128, 64, 8, 2, True),
    PrefillConfig(128, 64, 8, 3, True),
    PrefillConfig(128, 64, 8, 4, True),
    PrefillConfig(128, 64, 8, 2, False),
    PrefillConfig(128, 64, 8, 3, False),
    PrefillConfig(64, 64, 4, 2, True),
    PrefillConfig(64, 64, 4, 3, True),
    PrefillConfig(64, 128, 4, 2, True),
    PrefillConfig(64, 64, 4, 2, False),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `chunk` new tokens each after `prefix` cached ones."""

    requests: int
    chunk: int
    prefix: int

    @property
    def name(self) -> str:
        return f"prefill {self.requests}x{self.chunk} new, prefix {self.prefix}"

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return tuple(accumulate([self.chunk] * self.requests, initial=0))

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        return (self.prefix,) * self.requests

    @property
    def entries(self) -> int:
        return self.requests * (self.prefix + self.chunk)

    @property
    def attention_flops(self) -> int:
        """Both products over the pairs of query and visible key."""
        pairs = self.requests * (self.chunk * self.prefix + self.chunk * (self.chunk + 1) // 2)
        return 2 * (NOPE + ROPE + V) * HEADS * pairs

    @property
    def flops(self) -> int:
        """With the expansion of the entries."""
        return self.attention_flops + 2 * self.entries * LORA * HEADS * (NOPE + V)

    @property
    def bytes(self) -> int:
        """Queries, results, entries and kv_b once, in bfloat16."""
        queries = self.requests * self.chunk * HEADS * (NOPE + ROPE + V)
        return 2 * (queries + self.entries * (LORA + ROPE) + HEADS * (NOPE + V) * LORA)


LOADS = (
    Load(1, 2048, 0),
    Load(1, 2048, 2048),
    Load(1, 2048, 10240),
    Load(8, 1024, 0),
    Load(1, 16, 12288),
    Load(1, 128, 81920),
    Load(1, 768, 81920),
)


def arguments(load: Load, device: torch.device) -> tuple[Any, ...]:
    """One layer's arguments of the op on random data, pages in random order."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    tokens, pages = load.requests * load.chunk, -(-load.prefix // PAGE)
    kv_b = normal(HEADS, NOPE + V, LORA) * LORA**-0.5
    return (
        normal(tokens, HEADS, NOPE + ROPE),
        normal(load.requests * pages + 1, PAGE, LORA + ROPE),
        torch.randperm(load.requests * pages, device=device).view(load.requests, pages),
        load.cu_seqlens,
        load.prefix_lens,
        normal(tokens, LORA + ROPE),
        kv_b[:, :NOPE],
        kv_b[:, NOPE:],
        SCALE,
    )


def rotating(
    sets: list[tuple[Any, ...]], load: Load, device: torch.device, config: PrefillConfig | None = None
) -> Callable[[], object]:
    """Each call takes the next of `sets`; they share a plan, as the layers of a forward do."""
    plan = plan_prefill_attention(load.cu_seqlens, load.prefix_lens, SIZES, device, config=config)
    turn = cycle(sets)
    return lambda: prefill_attention(*next(turn), plan=plan)


def _make(load: Load, device: torch.device) -> Runner:
    sets = [arguments(load, device) for _ in range(SETS)]

    def check() -> None:
        assert_close(prefill_attention(*sets[0]), twin(*sets[0]), "bf16-attention")

    candidates = {
        "x".join(map(str, config[:4])) + (" tma" if config.descriptors else ""): rotating(
            sets, load, device, config
        )
        for config in CANDIDATES
    }
    return Runner(rotating(sets, load, device), check, candidates)


def cases() -> list[Case]:
    """What a prefill step meets: chunks of a long prompt, short prompts together, a last piece."""
    return [Case(load.name, load.bytes, load.flops, partial(_make, load)) for load in LOADS]
