"""Linear layers of a tensor-parallel rank of DeepSeek-V3: few tokens over weights that come from memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import gemm
from nextn.kernels.ref import gemm as ref
from tests.compare import assert_close

BLOCK = (128, 128)
ROTATED_BYTES = 240_000_000  # of weights in all: twice and more what the L2 can hold between two uses
SHAPES = {
    "q_a+kv_a": (2112, 7168, True, (1, 4, 16, 64)),
    "q_b": (3072, 1536, True, (1, 4, 64)),
    "o": (7168, 2048, True, (1, 4, 16, 64)),
    "dense gate+up": (4608, 7168, True, (4, 64)),
    "dense down": (7168, 2304, True, (4,)),
    "eh_proj": (7168, 14336, False, (1, 16)),
    "head": (16160, 7168, False, (1, 4, 64)),
}
LARGE = [("q_a+kv_a", 256), ("q_a+kv_a", 4096), ("o", 4096), ("head", 256)]

Inputs = tuple[Tensor, Tensor, Tensor | None]


def cases() -> list[Case]:
    """The shapes that carry the bytes of a step, then some of a prefill."""
    few = [_case(name, tokens) for name, (*_, counts) in SHAPES.items() for tokens in counts]
    return few + [_case(name, tokens) for name, tokens in LARGE]


def _case(name: str, tokens: int) -> Case:
    rows, columns, fp8, _ = SHAPES[name]
    kind = "fp8" if fp8 else "bf16"
    weight_bytes = rows * columns * (1 if fp8 else 2)
    moved = weight_bytes + 2 * tokens * columns + 4 * tokens * rows
    return Case(
        name=f"gemm {name} {tokens}x{rows}x{columns} {kind}",
        bytes=moved,
        flops=2 * tokens * rows * columns,
        make=partial(_make, tokens, rows, columns, fp8, head=name == "head"),
    )


def _make(tokens: int, rows: int, columns: int, fp8: bool, device: torch.device, *, head: bool) -> Runner:
    count = max(2, -(-ROTATED_BYTES // (rows * columns * (1 if fp8 else 2))))
    inputs = [_inputs(tokens, rows, columns, fp8, device) for _ in range(count)]
    configs = _candidates(tokens, gemm.choose_config(tokens, rows, columns, fp8=fp8), fp8, head)

    def call(x: Tensor, weight: Tensor, scale: Tensor | None, config: gemm.Config | None) -> Tensor:
        if head:
            return gemm.linear(x, weight, scale, BLOCK, out_dtype=torch.float32, config=config)
        return gemm.linear_summands(x, weight, scale, BLOCK, config=config)

    def rotating(config: gemm.Config | None) -> Callable[[], Tensor]:
        sets = itertools.cycle(inputs)
        return lambda: call(*next(sets), config)

    def check() -> None:
        x, weight, scale = inputs[0]
        expected = ref.linear(x.float(), weight.float(), scale, BLOCK)
        for config in (None, *configs.values()) if tokens <= gemm.DECODE_TOKENS else (None,):
            result = call(x, weight, scale, config)
            assert_close(result if head else result.sum(0), expected, "fp8-linear")

    return Runner(rotating(None), check, {label: rotating(config) for label, config in configs.items()})


def _inputs(tokens: int, rows: int, columns: int, fp8: bool, device: torch.device) -> Inputs:
    x = torch.randn(tokens, columns, device=device).bfloat16()
    weight = torch.randn(rows, columns, device=device)
    if not fp8:
        return x, weight.bfloat16(), None
    return x, weight.to(ref.FP8), torch.rand(ref.scale_shape(rows, columns, BLOCK), device=device) + 0.5


def _candidates(tokens: int, default: gemm.Config, fp8: bool, head: bool) -> dict[str, gemm.Config]:
    """One change at a time from the default, and the few combinations that promise something."""
    if tokens > gemm.DECODE_TOKENS:
        return _large(fp8)
    change = partial(replace, default)
    tall = {"block_r": 128, "warps": 8}
    configs = {
        "no prefetch": change(prefetch=0),
        "prefetch 2": change(prefetch=2),
        "prefetch all": change(prefetch=64),
        "3 stages": change(stages=3),
        **({"6 stages": change(stages=6)} if tokens <= 32 else {"2 stages": change(stages=2)}),
        "rows 64": change(block_r=64, warps=4),
        "rows 128": change(**tall),
        "rows 64, 8 warps": change(block_r=64, warps=8),
        "tokens first": change(weights_first=False, tokens=min(default.tokens, 32)),
        "tokens first, rows 128": change(weights_first=False, tokens=min(default.tokens, 32), **tall),
    }
    for splits in (1, 2) if head else sorted({2, 4, 8, 14} - {default.splits}):
        configs[f"splits {splits}"] = change(splits=splits)
    return {label: config for label, config in configs.items() if config != default}


def _large(fp8: bool) -> dict[str, gemm.Config]:
    cuts = [
        gemm.Config(64, 64, 1, 4, 4, prefetch=4),
        gemm.Config(64, 128, 1, 8, 4, prefetch=4),
        gemm.Config(128, 64, 1, 4, 4, block_k=64),
        gemm.Config(128, 128, 1, 8, 2),
        gemm.Config(128, 128, 1, 8, 3),
        gemm.Config(128, 128, 1, 8, 3, block_k=64),
        gemm.Config(128, 128, 1, 8, 4, block_k=64),
        gemm.Config(128, 128, 1, 8, 3, group=16),
        gemm.Config(128, 128, 1, 8, 3, weights_first=False),
        gemm.Config(128, 128, 4, 8, 3),
    ]
    if not fp8:
        cuts.append(gemm.Config(256, 128, 1, 8, 3, block_k=64))
    return {_label(config): config for config in cuts}


def _label(config: gemm.Config) -> str:
    """All that differs between the large cuts."""
    order = "" if config.weights_first else " tokens first"
    tile = f"{config.tokens}x{config.block_r}x{config.block_k}"
    return f"{tile} splits {config.splits} w{config.warps} st{config.stages} group {config.group}{order}"
