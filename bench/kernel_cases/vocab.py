"""Children, picks and noise over DeepSeek-V3's vocabulary and one of eight ranks' share of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import vocab
from nextn.kernels.ref import sampling as ref
from nextn.kernels.ref.sampling import SamplingBatch
from tests.compare import assert_close

VOCAB, SHARE = 129_280, 16_160
ROTATED = 240 << 20  # bytes of inputs in rotation
CONFIGS = [(block, warps) for block in (256, 512, 1024, 2048) for warps in (2, 4, 8)]


def cases() -> list[Case]:
    """One row and many, greedy and sampled; nodes: the root's children, a beam's, a tree's."""
    children = [(SHARE, 1, 1), (SHARE, 1, 4), (SHARE, 16, 4), (VOCAB, 1, 4), (VOCAB, 16, 4)]
    picks = [(SHARE, 1, 4), (SHARE, 16, 4), (VOCAB, 1, 4), (VOCAB, 4, 64)]
    noise = [(size, rows) for size in (SHARE, VOCAB) for rows in (1, 16)]
    return [
        *(_children(*shape, sampled) for shape in children for sampled in (False, True)),
        *(_picks(*shape, sampled) for shape in picks for sampled in (False, True)),
        *(_noise(*shape) for shape in noise),
    ]


def _batch(rows: int, sampled: bool, device: torch.device) -> SamplingBatch:
    real = torch.full((rows,), 0.7 if sampled else 0.0, device=device)
    whole, none = torch.arange(rows, device=device), torch.zeros(0, device=device)
    return SamplingBatch(
        real, whole, real, real, real, real, real, whole, whole, none, none, sampled, False, False
    )


def _logits(rows: int, nodes: int, size: int, device: torch.device) -> list[Tensor]:
    """As many sets as pass the L2, drawn with float32's full resolution so that few scores tie."""
    sets = max(2, min(64, ROTATED // (rows * nodes * size * 4)))
    return [3 * torch.randn(rows, nodes, size, device=device) for _ in range(sets)]


def _runner(
    run: Callable[[Tensor, tuple[int, int] | None], object], sets: list[Tensor], check: Callable[[], None]
) -> Runner:
    turn = cycle(sets)

    def call(config: tuple[int, int] | None) -> object:
        return run(next(turn), config)

    candidates = {f"{block} tokens, {warps} warps": partial(call, (block, warps)) for block, warps in CONFIGS}
    return Runner(partial(call, None), check, candidates)


def _name(op: str, size: int, rows: int, nodes: int, sampled: bool) -> str:
    return f"{op} {rows}x{nodes}x{size} {'sampled' if sampled else 'greedy'}"


def _children(size: int, rows: int, nodes: int, sampled: bool, k: int = 4) -> Case:
    def make(device: torch.device) -> Runner:
        batch, sets = _batch(rows, sampled, device), _logits(rows, nodes, size, device)
        noise = ref.level_noise(batch, batch.seed, 1, size, torch.float32)

        def check() -> None:
            tokens, values = vocab.best_children(sets[0], batch, noise, k)
            expected, expected_values = ref.best_children(sets[0], batch, noise, k)
            assert_close(values, expected_values, "fp32-op", what="values")
            assert (tokens != expected).float().mean() < 0.02, "tokens differ by more than ties in rounding"

        return _runner(lambda x, c: vocab.best_children(x, batch, noise, k, config=c), sets, check)

    size_in_bytes = rows * size * 4 * (nodes + sampled)
    return Case(_name("children", size, rows, nodes, sampled), size_in_bytes, 0, make)


def _picks(size: int, rows: int, nodes: int, sampled: bool, levels: int = 3) -> Case:
    def make(device: torch.device) -> Runner:
        batch, sets = _batch(rows, sampled, device), _logits(rows, nodes, size, device)
        noise = ref.level_noise(batch, batch.seed, levels, size, torch.float32)
        level = torch.arange(nodes, device=device).clamp(max=levels - 1).expand(rows, -1).contiguous()

        def check() -> None:
            picked = vocab.pick_tokens(sets[0], batch, noise, level)
            expected = ref.pick_tokens(sets[0], batch, noise, level)
            assert (picked != expected).float().mean() < 0.02, "picks differ by more than ties in rounding"

        return _runner(lambda x, c: vocab.pick_tokens(x, batch, noise, level, config=c), sets, check)

    size_in_bytes = rows * size * 4 * (nodes + (levels if sampled else 0))
    return Case(_name("picks", size, rows, nodes, sampled), size_in_bytes, 0, make)


def _noise(size: int, rows: int, levels: int = 3) -> Case:
    def make(device: torch.device) -> Runner:
        batch = _batch(rows, True, device)

        def run() -> Tensor:
            return vocab.level_noise(batch, batch.seed, levels, size, torch.float32)

        def check() -> None:
            expected = ref.level_noise(batch, batch.seed, levels, size, torch.float32)
            assert_close(run(), expected, "fp32-op")

        return Runner(run, check, {})

    return Case(f"noise {rows}x{levels}x{size}", rows * levels * size * 4, 0, make)
