"""Growth, rerank and acceptance: bound by latency, so the bytes say little and the microseconds all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.kernels import Case, Runner
from nextn.config import SpecConfig
from nextn.kernels import tree_ops
from nextn.kernels.ref import tree_ops as ref
from nextn.kernels.ref.tree_ops import Pool
from tests.compare import assert_close

WARPS = (1, 2, 4, 8)


def cases() -> list[Case]:
    """The engine's usual tree for one row and for many, and large trees."""
    shapes = [("2/4/4", 1), ("2/4/4", 16), ("3/4/8", 16), ("5/8/64", 1), ("3/32/64", 1)]
    return [make(shape, rows) for shape, rows in shapes for make in (_expand, _rerank, _accept)]


def _grown(spec: SpecConfig, rows: int, device: torch.device) -> Pool:
    """A full pool of random candidates."""
    k, beam = spec.topk, None
    values = -torch.rand(rows, 1, k, device=device)
    pool = Pool.empty(values[:, 0], spec.num_steps)
    for level in range(1, spec.num_steps + 1):
        beam = ref.expand(torch.randint(0, 1000, values.shape, device=device), values, beam, pool, level)
        values = -torch.rand(rows, k, k, device=device)
    return pool


def _case(op: str, shape: str, rows: int, size: int, make: Callable[[torch.device], Runner]) -> Case:
    return Case(f"{op} {shape}, {rows} rows", rows * size, 0, make)


def _expand(shape: str, rows: int) -> Case:
    """Level 2, or the last where there are two: a beam comes of it unless it is the last."""
    spec = SpecConfig.parse(shape)
    k = spec.topk

    def make(device: torch.device) -> Runner:
        values = -torch.rand(rows, k, k, device=device)
        tokens = torch.randint(0, 1000, values.shape, device=device)
        pool = Pool.empty(values[:, 0], spec.num_steps)
        beam = ref.expand(tokens[:, :1], values[:, :1], None, pool, 1)

        def check() -> None:
            twin = Pool(*(part.clone() for part in pool))
            actual = tree_ops.expand(tokens, values, beam, pool, 2)
            expected = ref.expand(tokens, values, beam, twin, 2)
            for tensor, like in zip(actual or (), expected or (), strict=True):
                assert_close(tensor, like, "bitwise")
            end = k + k * k
            assert_close(pool.values[:, :end], twin.values[:, :end], "bitwise")

        return Runner(
            lambda: tree_ops.expand(tokens, values, beam, pool, 2),
            check,
            {
                f"{w} warps": lambda w=w: tree_ops.expand(tokens, values, beam, pool, 2, config=w)
                for w in WARPS
            },
        )

    return _case("expand", shape, rows, k * k * 24, make)


def _rerank(shape: str, rows: int) -> Case:
    spec = SpecConfig.parse(shape)

    def make(device: torch.device) -> Runner:
        pool = _grown(spec, rows, device)
        root = torch.zeros(rows, dtype=torch.int64, device=device)
        args = root, pool, spec.topk, spec.draft_tokens

        def check() -> None:
            for tensor, twin in zip(tree_ops.rerank(*args), ref.rerank(*args), strict=True):
                assert_close(tensor, twin, "bitwise")

        return Runner(
            lambda: tree_ops.rerank(*args),
            check,
            {f"{w} warps": lambda w=w: tree_ops.rerank(*args, config=w) for w in WARPS},
        )

    return _case("rerank", shape, rows, spec.pool_size * 4 + spec.draft_tokens * 36, make)


def _accept(shape: str, rows: int) -> Case:
    spec = SpecConfig.parse(shape)

    def make(device: torch.device) -> Runner:
        pool = _grown(spec, rows, device)
        root = torch.zeros(rows, dtype=torch.int64, device=device)
        tokens, parents, *_ = ref.rerank(root, pool, spec.topk, spec.draft_tokens)
        target = tokens.roll(-1, 1)

        def check() -> None:
            actual = tree_ops.accept_path(tokens, parents, target, spec.width)
            for tensor, twin in zip(
                actual, ref.accept_path(tokens, parents, target, spec.width), strict=True
            ):
                assert_close(tensor, twin, "bitwise")

        return Runner(lambda: tree_ops.accept_path(tokens, parents, target, spec.width), check, {})

    return _case("accept", shape, rows, spec.draft_tokens * 24, make)
