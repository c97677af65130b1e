"""Prefill attention side by side: this project's kernel, FlashInfer's ragged prefill, torch's own.

`python -m bench.prefill_backends` on a GPU. A backend is checked against the kernel before it is timed; one
that is wrong is named and makes the exit status 1, one that is missing or does not run is named with its
reason. "whole" is the op from cache pages on: gathering and expanding entries, and for the others joining the
shared rope key to every head's keys. "attention" is the attention kernel alone. TFLOP/s count attention's two
products only, in both.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.jsonl import write_jsonl
from bench.kernel_cases.prefill import HEADS, NOPE, ROPE, SCALE, SIZES, Load, V, arguments
from bench.kernels import time_calls
from nextn.kernels.prefill import (
    attend_expanded,
    expand_entries,
    gather_entries,
    plan_prefill_attention,
    prefill_attention,
    stacked_weight,
)
from tests.compare import assert_close

LOADS = (Load(1, 2048, 0), Load(1, 2048, 2048), Load(1, 2048, 10240), Load(8, 1024, 0))
FLASHINFER_WORKSPACE = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One backend under one load; times in microseconds."""

    load: str
    backend: str
    attention_us: float
    whole_us: float
    attention_tflops: float
    whole_tflops: float


class Problem:
    """One layer's inputs under a load, and the steps that every backend shares."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.load, self.args = load, arguments(load, device)
        self.plan = plan_prefill_attention(load.cu_seqlens, load.prefix_lens, SIZES, device)
        (self.part,) = self.plan.parts
        assert self.part.entries == load.entries, "the others need a load without padding"
        self.q: Tensor = self.args[0]
        self.weight = stacked_weight(*self.args[6:8])

    def expand(self) -> tuple[Tensor, Tensor]:
        """Gathered entries [K, C] and their keys and values [K, H * (nope + v)]."""
        cache_layer, page_table, latents = self.args[1], self.args[2], self.args[5]
        entries = gather_entries(cache_layer, page_table, latents, self.part, self.plan)
        return entries, expand_entries(entries, self.weight)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """What others take: keys [K, H, nope + rope] with the rope key in each head, values [K, H, v]."""
        entries, expanded = self.expand()
        keys, values = expanded.view(-1, HEADS, NOPE + V).split([NOPE, V], -1)
        ropes = entries[:, None, -ROPE:].expand(-1, HEADS, -1)
        return torch.cat((keys, ropes), -1), values

    def indptr(self, chunk: int) -> Tensor:
        """Offsets of requests of `chunk` rows each, on the host.  # [R + 1] int32"""
        return torch.arange(0, chunk * (self.load.requests + 1), chunk, dtype=torch.int32)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, H, nope + rope], keys [K, H, nope + rope], values [K, H, v] to [T, H, v]."""


def flashinfer_attention(problem: Problem, backend: str) -> Attention:
    """FlashInfer's planned ragged prefill; it compiles at first use, which needs nvcc."""
    import flashinfer

    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    load = problem.load
    wrapper.plan(
        problem.indptr(load.chunk),
        problem.indptr(load.prefix + load.chunk),
        HEADS,
        HEADS,
        NOPE + ROPE,
        head_dim_vo=V,
        causal=True,  # aligned to the last key, so a prefix is seen by all
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    run: Attention = wrapper.run
    return run


def torch_attention(problem: Problem, *, pad_values: bool) -> Attention:
    """Torch's fused attention over a batch of equal requests.

    Its flash kernel wants keys and values of one width: pad_values gives it that.
    """
    load = problem.load
    mask = causal_lower_right(load.chunk, load.prefix + load.chunk)

    def batched(x: Tensor) -> Tensor:
        return x.unflatten(0, (load.requests, -1)).transpose(1, 2)  # [R, H, rows, width]

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if pad_values:
            values = F.pad(values, (0, NOPE + ROPE - V))
        q, keys, values = batched(q), batched(keys), batched(values)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=SCALE)
        return out.transpose(1, 2).flatten(0, 1)[..., :V]

    return attend


BACKENDS: dict[str, Callable[[Problem], Attention]] = {
    "flashinfer fa3": lambda problem: flashinfer_attention(problem, "fa3"),
    "flashinfer fa2": lambda problem: flashinfer_attention(problem, "fa2"),
    "torch": lambda problem: torch_attention(problem, pad_values=False),
    "torch, padded values": lambda problem: torch_attention(problem, pad_values=True),
}


def time_kernel(problem: Problem) -> Row:
    """This project's op, whole and without gathering and expanding."""
    entries, expanded = problem.expand()
    out = problem.q.new_empty(*problem.q.shape[:2], V)

    def attend() -> None:
        attend_expanded(problem.q, entries, expanded, out, problem.part, problem.plan, SCALE)

    def whole() -> Tensor:
        return prefill_attention(*problem.args, plan=problem.plan)

    return row(problem.load, "nextn", time_calls(attend), time_calls(whole))


def time_backend(problem: Problem, name: str) -> Row:
    """Another backend, after a check against this project's op."""
    attend = BACKENDS[name](problem)
    keys, values = problem.keys_and_values()
    expected = prefill_attention(*problem.args, plan=problem.plan)
    assert_close(attend(problem.q, keys, values).contiguous(), expected, "bf16-op", what=name)
    attention_us = time_calls(lambda: attend(problem.q, keys, values))
    whole_us = time_calls(lambda: attend(problem.q, *problem.keys_and_values()))
    return row(problem.load, name, attention_us, whole_us)


def row(load: Load, backend: str, attention_us: float, whole_us: float) -> Row:
    """Rates of two timings."""
    rates = (load.attention_flops / us / 1e6 for us in (attention_us, whole_us))
    return Row(load.name, backend, attention_us, whole_us, *rates)


def line(each: Row) -> str:
    """One aligned line."""
    return (
        f"{each.load:34} {each.backend:22} {each.attention_us:9.1f} us {each.attention_tflops:6.0f} TFLOP/s "
        f"{each.whole_us:9.1f} us {each.whole_tflops:6.0f} TFLOP/s"
    )


def versions() -> dict[str, Any]:
    """What was measured, where."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if importlib.util.find_spec("flashinfer") is not None:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--jsonl", type=Path, help="write versions and every row here, one JSON object a line"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("attention is timed on a GPU; there is none here")
    about = versions()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    names = list(BACKENDS)
    if "flashinfer" not in about:
        print("flashinfer is not installed: its backends are left out")
        names = [name for name in names if not name.startswith("flashinfer")]
    print(f"{'load':34} {'backend':22} {'attention alone':>27} {'whole':>27}")
    rows, wrong = [], 0
    for load in LOADS:
        problem = Problem(load, torch.device("cuda"))
        rows.append(time_kernel(problem))
        print(line(rows[-1]), flush=True)
        for name in names:
            try:
                rows.append(time_backend(problem, name))
                print(line(rows[-1]), flush=True)
            except AssertionError as error:
                wrong += 1
                print(f"{load.name:34} {name:22} WRONG: {error}", flush=True)
            except (
                RuntimeError,
                ValueError,
                TypeError,
                OSError,
            ) as error:  # no nvcc, no kernel for the shape
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                print(f"{load.name:34} {name:22} does not run: {reason}", flush=True)
        del problem
        torch.cuda.empty_cache()
    write_jsonl(args.jsonl, [about, *map(asdict, rows)])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
