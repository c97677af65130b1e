"""DeepSeek-V3's routed and shared experts, as one of eight ranks has them and whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import moe
from nextn.kernels.moe import MoeConfig
from nextn.kernels.ref import moe as ref
from nextn.kernels.ref.gemm import FP8, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts

HIDDEN, EXPERTS, TOP_K, BLOCK = 7168, 256, 8, (128, 128)
SETS = 24  # choices that consecutive calls take in turn, of one layer's weights, far larger than the L2


def cases() -> list[Case]:
    """Decode with random and with equal choices, and prefill."""
    rank = [_case(tokens, 256, "random") for tokens in (1, 4, 16, 64)]
    whole = [_case(4, 2048, "random"), _case(2048, 2048, "random")]
    return [*rank, _case(64, 256, "equal"), _case(2048, 256, "random"), *whole]


def _choices(tokens: int, kind: str) -> list[Tensor]:
    """Experts [tokens, k] of each call; `equal` tokens choose the same, others than the call before."""
    generator = torch.Generator().manual_seed(tokens)
    rows = 1 if kind == "equal" else tokens
    chosen = [torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K] for _ in range(SETS)]
    return [each.expand(tokens, TOP_K).contiguous() for each in chosen]


def _case(tokens: int, width: int, kind: str) -> Case:
    distinct = sum(choice.unique().numel() for choice in _choices(tokens, kind)) / SETS
    size = int((distinct + 1) * 3 * width * HIDDEN)
    flops = 2 * tokens * (TOP_K + 1) * 3 * width * HIDDEN
    name = f"moe {tokens} tokens x {width}, {kind}, {distinct:.0f} experts"
    return Case(name, size, flops, lambda device: _make(tokens, width, kind, device))


def _fp8(device: torch.device, *size: int) -> tuple[Tensor, Tensor]:
    """Random weights whose products are of order 1, filled one matrix at a time."""
    weight = torch.empty(size, dtype=FP8, device=device)
    for matrix in weight.view(-1, *size[-2:]):
        matrix.copy_(torch.randn(size[-2:], device=device))
    scales = scale_shape(size[-2], size[-1], BLOCK)
    return weight, (torch.rand(*size[:-2], *scales, device=device) + 0.5) / size[-1] ** 0.5


def _make(tokens: int, width: int, kind: str, device: torch.device) -> Runner:
    w13, scale13 = _fp8(device, EXPERTS, 2 * width, HIDDEN)
    w2, scale2 = _fp8(device, EXPERTS, HIDDEN, width)
    (s13, sscale13), (s2, sscale2) = _fp8(device, 2 * width, HIDDEN), _fp8(device, HIDDEN, width)
    experts = ExpertWeights(w13, w2, scale13, scale2, BLOCK)
    shared = SharedExperts(s13, s2, sscale13, sscale2)
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    weights = torch.rand(tokens, TOP_K, device=device) + 0.5
    choices = [choice.to(device) for choice in _choices(tokens, kind)]
    turn = itertools.cycle(choices)

    def call(config: MoeConfig | None) -> Callable[[], object]:
        return lambda: moe.moe_summands(x, weights, next(turn), experts, shared, config=config)

    def check() -> None:
        actual = moe.moe_summands(x, weights, choices[0], experts, shared).double()
        expected = ref.moe_summands(x, weights, choices[0], experts, shared).double()
        error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 2.0**-7, f"the relative error is {error:.2g}"

    found = {"/".join(map(str, config)): call(config) for config in _configs(tokens, width)}
    return Runner(call(None), check, found)


def _configs(tokens: int, width: int) -> list[MoeConfig]:
    """block tokens; gate columns, splits, warps, stages; down rows, repeats, warps, stages."""
    if tokens > moe.DECODE_TOKENS:
        repeats = 4 if width <= 256 else 1
        return [
            MoeConfig(64, 32, 1, 4, 4, 64, repeats, 4, 3),
            MoeConfig(64, 64, 1, 8, 4, 128, repeats, 8, 3),
            MoeConfig(64, 64, 1, 8, 3, 64, repeats, 8, 2),
            MoeConfig(128, 64, 1, 8, 3, 128, repeats, 8, 3),
            MoeConfig(128, 64, 1, 8, 4, 128, 2 * repeats if width <= 256 else 1, 8, 2),
        ]
    if width > 256:
        return [
            MoeConfig(16, 32, 1, 4, gate_stages, down_rows, 1, 4, down_stages)
            for gate_stages, down_rows, down_stages in (
                (3, 64, 3), (4, 64, 5), (5, 64, 6), (6, 128, 3), (8, 128, 4),
            )
        ]  # fmt: skip
    gates = (
        (32, 1, 4, 6),
        (32, 2, 4, 4),
        (32, 2, 4, 6),
        (32, 4, 4, 3),
        (32, 7, 4, 3),
        (16, 2, 4, 6),
        (64, 4, 4, 3),
    )
    downs = ((64, 2, 4, 2), (64, 4, 4, 2), (64, 7, 4, 3), (128, 1, 4, 1), (128, 2, 4, 2), (128, 2, 8, 2))
    usual = MoeConfig(16, 32, 4, 4, 4, 64, 4, 4, 3)
    by_gate = [MoeConfig(16, *gate, *usual[5:]) for gate in gates]
    return by_gate + [MoeConfig(*usual[:5], *down) for down in downs]
