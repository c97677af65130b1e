"""Tree attention at DeepSeek-V3's latent: one rank's 16 heads at several context lengths, and all 128.

Calls rotate through page tables over one cache, so that entries come from memory; where 24 calls' entries fit
the L2 (a single row of 1024), they come from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels import CALLS, Case, Runner
from nextn.kernels import attention
from nextn.kernels.ref import attention as ref
from tests.compare import assert_close

KV_LORA, ROPE, VALUE, PAGE = 512, 64, 128, 64
WIDTH = KV_LORA + ROPE
SCALE = 0.135
ROTATED = 400 << 20  # bytes of entries that calls rotate through, far more than the L2 holds
SHAPES = (  # heads, rows, context, nodes
    (16, 16, 12288, 4),
    (16, 16, 12288, 1),
    (16, 1, 131072, 4),
    (16, 1, 1024, 1),
    (16, 1, 1024, 4),
    (16, 1, 12288, 4),
    (16, 8, 1024, 4),
    (16, 16, 12288, 8),
    (128, 16, 12288, 1),
)


@dataclass(frozen=True, slots=True)
class _Shape:
    heads: int
    rows: int
    context: int
    nodes: int

    @property
    def bytes(self) -> int:
        return self.rows * (self.context + self.nodes) * WIDTH * 2

    @property
    def flops(self) -> int:
        return 2 * self.heads * self.nodes * self.rows * self.context * (WIDTH + KV_LORA)

    def case(self) -> Case:
        name = f"attention {self.heads} heads, bs {self.rows} x ctx {self.context}, D={self.nodes}"
        return Case(name, self.bytes, self.flops, self.make)

    def make(self, device: torch.device) -> Runner:
        """Inputs on `device`; every call takes the next page table."""
        sets = min(CALLS, -(-ROTATED // self.bytes))
        width = self.context // PAGE
        cache = torch.randn(sets * self.rows * width, PAGE, WIDTH, device=device, dtype=torch.bfloat16)
        tables = torch.randperm(sets * self.rows * width, device=device).view(sets, self.rows, width)
        prefix = torch.full((self.rows,), self.context, device=device)
        order = torch.arange(self.nodes, device=device)
        mask = ((1 << order) | 1).repeat(self.rows, 1)  # the root and itself: siblings
        inputs = _Inputs(
            torch.randn(self.rows * self.nodes, self.heads, WIDTH, device=device).bfloat16(),
            cache,
            tables,
            prefix,
            torch.randn(self.rows, self.nodes, WIDTH, device=device).bfloat16(),
            mask,
            torch.randn(self.heads, 2 * VALUE, KV_LORA, device=device).bfloat16()[:, VALUE:],
        )
        return Runner(inputs.caller(None), inputs.check, self._candidates(inputs))

    def _candidates(self, inputs: _Inputs) -> dict[str, Callable[[], object]]:
        sms = attention.processors_of(inputs.q.device)
        default = attention.choose_config(self.rows, self.nodes, self.heads, VALUE, sms)
        found = {}
        for block, stages in ((64, 2), (32, 3), (32, 4)):
            for fraction in (1.0, 0.97, 0.5):
                splits = max(1, int(default.splits * fraction))
                config = default._replace(block_kv=block, stages=stages, splits=splits)
                found[f"kv {block} stages {stages} splits {splits}"] = config
        found["without roles"] = default._replace(roles=False)
        for slots, warps in ((4, 4), (8, 4), (32, 4), (16, 2), (16, 8)):
            found[f"merge slots {slots} w{warps}"] = default._replace(merge_slots=slots, merge_warps=warps)
        found["fused" if not default.fused else "not fused"] = default._replace(
            fused=not default.fused, up_values=32 if default.fused else 64
        )
        for values, warps in ((16, 4), (32, 8), (64, 4), (128, 4), (128, 8)):
            found[f"up values {values} w{warps}"] = default._replace(up_values=values, up_warps=warps)
        return {label: inputs.caller(config) for label, config in found.items()}


@dataclass(frozen=True, slots=True)
class _Inputs:
    q: Tensor
    cache: Tensor
    tables: Tensor  # [sets, B, P]
    prefix: Tensor
    tail: Tensor
    mask: Tensor
    w_uv: Tensor

    def arguments(self, table: Tensor) -> tuple[object, ...]:
        return (self.q, self.cache, table, self.prefix, self.tail, self.mask, SCALE, self.w_uv)

    def caller(self, config: attention.AttentionConfig | None) -> Callable[[], object]:
        block = None if config is None else config.block_kv
        plan = attention.plan_attention(self.prefix, self.tail.shape[1], block_kv=block)
        turn = itertools.cycle(self.tables.unbind())
        return lambda: attention.decode_attention(*self.arguments(next(turn)), plan=plan, config=config)

    def check(self) -> None:
        table = self.tables[0]
        plan = attention.plan_attention(self.prefix, self.tail.shape[1])
        actual = attention.decode_attention(*self.arguments(table), plan=plan)
        assert_close(actual, ref.decode_attention(*self.arguments(table)), "bf16-attention")


def cases() -> list[Case]:
    """Every shape."""
    return [_Shape(*shape).case() for shape in SHAPES]
