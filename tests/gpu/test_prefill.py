"""Prefill attention on the GPU at DeepSeek-V3's sizes, one rank of eight, against its twin."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nextn.kernels import prefill
from nextn.kernels.prefill import PrefillSizes, plan_prefill_attention, prefill_attention
from nextn.kernels.ref.attention import prefill_attention as twin
from tests.compare import assert_close

pytestmark = pytest.mark.gpu
HEADS, NOPE, ROPE, V, LORA, PAGE = 16, 128, 64, 128, 512, 64
SIZES = PrefillSizes(HEADS, NOPE, V, LORA + ROPE)
SCALE = (NOPE + ROPE) ** -0.5


def _inputs(chunks: list[int], prefixes: list[int]) -> dict[str, Any]:
    """Shuffled pages with NaN outside the prefixes; scores spread enough for a softmax with a shape."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    counts = [-(-prefix // PAGE) for prefix in prefixes]
    pages = torch.randperm(sum(counts), device="cuda") + 1
    cache = torch.full((sum(counts) + 2, PAGE, LORA + ROPE), float("nan"), device="cuda").bfloat16()
    table = torch.full((len(prefixes), max(counts) + 1), 10**12, device="cuda")
    begin = 0
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        table[row, :count] = pages[begin : begin + count]
        filled = torch.full((count * PAGE, LORA + ROPE), float("nan"), device="cuda").bfloat16()
        filled[:prefix] = normal(prefix, LORA + ROPE)
        cache[pages[begin : begin + count]] = filled.view(count, PAGE, LORA + ROPE)
        begin += count
    tokens = sum(chunks)
    kv_b = (torch.randn(HEADS, NOPE + V, LORA, device="cuda") * LORA**-0.5).bfloat16()
    return {
        "q": normal(tokens, HEADS, NOPE + ROPE),
        "cache_layer": cache,
        "page_table": table,
        "cu_seqlens": tuple(torch.tensor([0, *chunks]).cumsum(0).tolist()),
        "prefix_lens": tuple(prefixes),
        "latents": normal(tokens, LORA + ROPE),
        "w_uk": kv_b[:, :NOPE],
        "w_uv": kv_b[:, NOPE:],
        "scale": SCALE,
    }


@pytest.mark.parametrize(
    ("chunks", "prefixes"),
    [
        ([2048], [0]),
        ([300], [4133]),
        ([1, 700, 65, 128], [3000, 0, 129, 1]),
        ([7, 64], [500, 0]),
        ([300, 40], [16_000, 9000]),
    ],
    ids=["whole prompt", "later chunk", "mixed batch", "short chunks", "tiles in pieces"],
)
@pytest.mark.parametrize("descriptors", [True, False], ids=["tma", "pointers"])
def test_the_kernel_agrees_with_its_twin(chunks, prefixes, descriptors):
    args = _inputs(chunks, prefixes)
    config = prefill.choose_config(SIZES, max(chunks))
    if not descriptors:
        config = prefill.choose_config(SIZES._replace(nope=NOPE - 1), max(chunks))
        assert not config.descriptors
    assert_close(prefill_attention(**args, config=config), twin(**args), "bf16-attention")


def test_parts_and_groups_of_heads_give_the_same_result(monkeypatch):
    args = _inputs([200, 100], [900, 300])
    whole = prefill_attention(**args)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 2 << 20)
    plan = plan_prefill_attention(
        args["cu_seqlens"], args["prefix_lens"], SIZES, torch.device("cuda"), config=None
    )
    assert len(plan.parts) == 2
    assert all(part.heads < HEADS for part in plan.parts)
    # cuBLAS may add in another order for other sizes, so not the same bits.
    assert_close(prefill_attention(**args, plan=plan), whole, "bf16-attention")


def test_nothing_waits_for_the_device():
    """Planning and attention launch without a synchronisation; two runs give the same bits."""
    args = _inputs([130, 40], [70, 0])
    expected = prefill_attention(**args)
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        out = prefill_attention(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out, expected, "bitwise")


def test_a_planned_call_can_be_captured_and_replays_on_new_data():
    args = _inputs([130, 40], [70, 0])
    plan = plan_prefill_attention(args["cu_seqlens"], args["prefix_lens"], SIZES, torch.device("cuda"))
    prefill_attention(**args, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention(**args, plan=plan)
    args["q"].copy_(torch.randn_like(args["q"]))
    args["latents"].copy_(torch.randn_like(args["latents"]))
    graph.replay()
    assert_close(out, prefill_attention(**args, plan=plan), "bitwise")
