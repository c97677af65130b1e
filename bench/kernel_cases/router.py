"""DeepSeek-V3's router, in decode and in prefill."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels import Case, Runner
from nextn.kernels import router
from nextn.kernels.ref import router as ref
from nextn.kernels.router import RouterConfig

HIDDEN, EXPERTS = 7168, 256
SETS = 48  # weights of 3.7 MB each, so that none is in the L2 when its turn comes again
V3: dict[str, Any] = {
    "scoring": "sigmoid",
    "method": "noaux_tc",
    "top_k": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "scaling": 2.5,
}


def cases() -> list[Case]:
    """bfloat16 weights at several numbers of tokens, and float32 weights at one."""
    bfloat16 = [_case(tokens, torch.bfloat16) for tokens in (1, 4, 16, 64, 2048)]
    return [*bfloat16, _case(4, torch.float32)]


def _case(tokens: int, dtype: torch.dtype) -> Case:
    name = f"router {tokens} tokens {str(dtype).removeprefix('torch.')}"
    size = EXPERTS * HIDDEN * dtype.itemsize + tokens * HIDDEN * 2
    return Case(name, size, 2 * tokens * EXPERTS * HIDDEN, lambda device: _make(tokens, dtype, device))


def _make(tokens: int, dtype: torch.dtype, device: torch.device) -> Runner:
    gates = [(torch.randn(EXPERTS, HIDDEN, device=device) / HIDDEN**0.5).to(dtype) for _ in range(SETS)]
    bias = torch.randn(EXPERTS, device=device) / 10
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    turn = itertools.cycle(gates)

    def call(config: RouterConfig | None) -> Callable[[], object]:
        return lambda: router.route_tokens(x, next(turn), bias, None, **V3, config=config)

    def check() -> None:
        actual = router.route_tokens(x, gates[0], bias, None, **V3)
        expected = ref.route_tokens(x, gates[0], bias, None, **V3)
        _assert_alike(actual, expected)

    found = {"/".join(map(str, config)): call(config) for config in _configs(tokens)}
    return Runner(call(None), check, found)


def _assert_alike(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """The same experts but for near-ties, which the order of a sum decides, and the same weights."""
    same = (actual[1] == expected[1]).all(-1)
    assert int((~same).sum()) <= max(1, same.numel() // 100), f"{int((~same).sum())} tokens choose otherwise"
    torch.testing.assert_close(actual[0][same], expected[0][same], rtol=1e-4, atol=1e-5)


def _configs(tokens: int) -> list[RouterConfig]:
    """Tiles (tokens, experts, hidden), splits, warps and stages to try."""
    if tokens <= router.DECODE_TOKENS:
        few = 16 if tokens <= 16 else 32
        return [
            RouterConfig(few, experts, hidden, splits, warps, stages)
            for experts, hidden, splits, warps, stages in (
                (32, 128, 14, 4, 4), (32, 128, 28, 4, 2), (32, 256, 28, 4, 2), (32, 128, 56, 4, 2),
                (16, 128, 14, 2, 4), (16, 256, 14, 2, 2), (16, 512, 14, 4, 1), (64, 128, 28, 4, 2),
                (64, 128, 56, 4, 1), (32, 128, 28, 2, 2),
            )
        ]  # fmt: skip
    return [
        RouterConfig(*tile, 4, 3)
        for tile in ((64, 64, 64, 1), (64, 64, 64, 4), (128, 64, 64, 2), (64, 128, 64, 4), (128, 128, 64, 4))
    ]
