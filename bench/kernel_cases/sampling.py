"""All choices of one cycle of a 3/1/4 tree from given logits: greedy, sampled, and with every option on."""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import ops
from nextn.kernels.ref import sampling as ref
from nextn.kernels.ref.sampling import SamplingBatch

VOCAB, SHARE = 129_280, 16_160
STEPS, NODES = 3, 4
ROTATED = 240 << 20  # bytes of inputs in rotation
OPTIONS = ("greedy", "sampled", "filters", "every option", "every option, logprobs")


def cases() -> list[Case]:
    """One row and sixteen, at one of eight ranks' share of DeepSeek-V3's vocabulary and at all of it."""
    return [_cycle(size, rows, what) for size in (SHARE, VOCAB) for rows in (1, 16) for what in OPTIONS]


def _batch(rows: int, size: int, what: str, device: torch.device) -> SamplingBatch:
    def real(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    number, every = torch.arange(rows, device=device), what.startswith("every")
    return SamplingBatch(
        temperature=real(0.0 if what == "greedy" else 0.7),
        top_k=torch.full_like(number, 50),
        top_p=real(0.9),
        min_p=real(0.001),
        frequency=real(0.3),
        presence=real(0.2),
        repetition=real(1.1),
        seed=number,
        choice=torch.zeros_like(number),
        counts=torch.zeros(rows, size, dtype=torch.int32, device=device),
        prompt_seen=torch.rand(rows, size, device=device) < 0.01,
        any_sampled=what != "greedy",
        any_filter=what == "filters" or every,
        any_penalty=every,
        any_bias=every,
        any_logprobs=what.endswith("logprobs"),
        bias_ids=torch.arange(300, device=device).expand(rows, -1).contiguous(),
        bias_values=torch.randn(rows, 300, device=device),
        banned_ids=torch.arange(32, device=device).expand(rows, -1).contiguous(),
        ban_until=torch.full_like(number, 100),
        raw_logprobs=torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _path(batch: SamplingBatch, nodes: int) -> tuple[Tensor, Tensor] | None:
    """Tokens on each node's path, as many as the tree is deep."""
    if not batch.any_penalty:
        return None
    rows = batch.seed.shape[0]
    tokens = batch.seed.new_zeros(rows, nodes, STEPS)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def _choose(draft: Tensor, tree: Tensor, batch: SamplingBatch) -> tuple[Tensor, ...]:
    """draft [STEPS, rows, 1, V], tree [rows, NODES, V]: the picks, and log-probabilities if asked for."""
    first = batch.seed
    noise = ops.level_noise(batch, first, STEPS + 1, tree.shape[2], torch.float32)
    level = torch.arange(NODES, device=tree.device).expand(tree.shape[0], -1)
    for step in range(STEPS):
        path, positions = _path(batch, 1), (first + step).unsqueeze(1)
        ops.best_children(draft[step], batch, noise[:, step : step + 1], 1, 1.0, path, positions)
    path, positions = _path(batch, NODES), first.unsqueeze(1) + level
    adjusted, after = ops.adjust_logits(tree, batch, path, positions)
    tokens = ops.pick_tokens(adjusted, after, noise, level)
    if not batch.any_logprobs:
        return (tokens,)
    return tokens, *ops.chosen_logprobs(tree, adjusted, batch, tokens)


def _cycle(size: int, rows: int, what: str) -> Case:
    bytes_read = 4 * rows * size * (STEPS + NODES)

    def make(device: torch.device) -> Runner:
        batch = _batch(rows, size, what, device)
        sets = [
            (
                3 * torch.randn(STEPS, rows, 1, size, device=device),
                3 * torch.randn(rows, NODES, size, device=device),
            )
            for _ in range(max(2, min(16, ROTATED // bytes_read)))
        ]
        turn = cycle(sets)

        def check() -> None:
            tree = sets[0][1]
            level = torch.arange(NODES, device=device).expand(rows, -1)
            noise = ref.level_noise(batch, batch.seed, STEPS + 1, size, torch.float32)
            path, positions = _path(batch, NODES), batch.seed.unsqueeze(1) + level
            expected = ref.pick_tokens(tree, batch, noise, level, path, positions)
            picked = _choose(*sets[0], batch)[0]
            assert (picked != expected).float().mean() < 0.02, "picks differ by more than ties in rounding"

        return Runner(lambda: _choose(*next(turn), batch), check, {})

    return Case(f"cycle {rows}x{NODES}x{size} {what}", bytes_read, 0, make)
