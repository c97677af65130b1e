"""Norms, and the activation between a dense network's products, at DeepSeek-V3's sizes.

A decode's inputs are small and were just written by the kernel before, so its few input sets stay in the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import norm
from nextn.kernels.ref import norm as ref
from tests.compare import assert_close

HIDDEN, EPS, SETS = 7168, 1e-6, 6


def cases() -> list[Case]:
    """Decode, where latency counts, and prefill, where bandwidth does."""
    adds = [(1, 4), (1, 9), (1, 14), (4, 4), (4, 9), (16, 9), (64, 9), (8192, 1)]
    silus = [(1, 14, 256), (4, 14, 2304), (64, 8, 2304), (8192, 1, 2304)]
    return [
        *(_add_norm(rows, parts) for rows, parts in adds),
        _join_norms(4),
        *(_silu(*sizes) for sizes in silus),
    ]


def _calls(sets: list[tuple[Any, ...]], op: Callable[..., object], **how: Any) -> Callable[[], object]:
    """`op` over the input sets in turn."""
    turn: Iterator[tuple[Any, ...]] = cycle(sets)
    return lambda: op(*next(turn), **how)


def _warps() -> dict[str, norm.NormConfig]:
    return {f"warps {warps}": norm.NormConfig(warps) for warps in (4, 8, 16, 32)}


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def _add_norm(rows: int, parts: int) -> Case:
    def make(device: torch.device) -> Runner:
        weight = _normal(device, HIDDEN).bfloat16()
        sets = [
            (_normal(device, rows, HIDDEN).bfloat16(), _normal(device, parts, rows, HIDDEN), weight, EPS)
            for _ in range(SETS if rows <= 64 else 1)
        ]

        def check() -> None:
            actual, expected = norm.add_norm(*sets[0]), ref.add_norm(*sets[0])
            assert_close(actual[0], expected[0], "bitwise", what="residual")
            assert_close(actual[1], expected[1], "bf16-op", what="normed")

        candidates = {label: _calls(sets, norm.add_norm, config=each) for label, each in _warps().items()}
        return Runner(_calls(sets, norm.add_norm), check, candidates)

    moved = rows * HIDDEN * (4 * parts + 3 * 2) + 2 * HIDDEN
    return Case(f"add_norm {parts}x{rows}x{HIDDEN}", moved, rows * HIDDEN * (parts + 4), make)


def _join_norms(rows: int) -> Case:
    def make(device: torch.device) -> Runner:
        weights = [_normal(device, HIDDEN).bfloat16() for _ in range(2)]
        sets = [
            (*(_normal(device, rows, HIDDEN).bfloat16() for _ in range(2)), *weights, EPS)
            for _ in range(SETS)
        ]

        def check() -> None:
            assert_close(norm.join_norms(*sets[0]), ref.join_norms(*sets[0]), "bf16-op")

        candidates = {label: _calls(sets, norm.join_norms, config=each) for label, each in _warps().items()}
        return Runner(_calls(sets, norm.join_norms), check, candidates)

    return Case(f"join_norms {rows}x2x{HIDDEN}", 4 * HIDDEN * (2 * rows + 1), 8 * rows * HIDDEN, make)


def _silu(rows: int, parts: int, half: int) -> Case:
    def make(device: torch.device) -> Runner:
        sets = [(_normal(device, parts, rows, 2 * half),) for _ in range(SETS if rows <= 64 else 1)]

        def check() -> None:
            actual, expected = norm.silu_and_mul_summands(*sets[0]), ref.silu_and_mul_summands(*sets[0])
            assert_close(actual, expected.bfloat16(), "bf16-op")

        configs = [
            norm.SiluConfig(block, warps) for block in (64, 128, 256, 512, 1024) for warps in (2, 4, 8)
        ]
        candidates = {
            f"block {each.block} warps {each.warps}": _calls(sets, norm.silu_and_mul_summands, config=each)
            for each in configs
        }
        return Runner(_calls(sets, norm.silu_and_mul_summands), check, candidates)

    moved = rows * half * (8 * parts + 2)
    return Case(f"silu_and_mul {parts}x{rows}x{2 * half}", moved, rows * half * (2 * parts + 4), make)
