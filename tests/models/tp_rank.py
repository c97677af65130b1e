"""What one rank of the tensor-parallel test runs, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nextn.kernels.comm import SINGLE, TensorParallel
from tests.models.build import Tiny, Tree, build, dequantized, prefill, quantize, small_dict

TOKENS = [5, 17, 3, 88, 41, 0, 2, 95, 30, 7]


def configs() -> dict[str, dict[str, Any]]:
    """Model shapes to share: V3's with a NextN layer and V2-Lite's, in float64."""
    v2 = {
        "q_lora_rank": None,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }
    return {"v3": small_dict(num_nextn_predict_layers=1), "v2": small_dict(n_shared_experts=2, **v2)}


def fp8_config() -> dict[str, Any]:
    """A model whose FP8 matrices two ranks can share."""
    return small_dict(
        num_attention_heads=16, moe_intermediate_size=256, intermediate_size=256, hidden_size=128
    )


def outputs(tp: TensorParallel) -> dict[str, Tensor]:
    """Logits of prefill, tree decode and draft of every model, the same on all ranks."""
    out = {}
    for name, config in configs().items():
        out.update(_run(name, build(config, dtype=torch.float64, tp=tp)))
    # Drawn without shards: every rank quantises the same full tensors.
    whole = build(fp8_config(), dtype=torch.float64)
    weights, scales = quantize(whole.state, whole.specs())
    assert dequantized(weights, scales)
    kept = build(fp8_config(), dtype=torch.float64, keep_fp8=True, tp=tp, state=weights, scales=scales)
    out.update(_run("fp8", kept))
    return out


def _run(name: str, tiny: Tiny) -> dict[str, Tensor]:
    pool = tiny.pool()
    hidden = prefill(tiny, pool, [TOKENS], [0])
    out = {f"{name} prefill": tiny.logits(hidden)}
    if tiny.nextn is not None:
        inp = pool.prefill_input([[*TOKENS[1:], 4]], [0])
        state = tiny.draft.prefill(inp, tiny.target.final_norm(hidden), pool.cache).hidden
        out[f"{name} draft"] = tiny.draft_logits(state)
    tree = Tree([4, 8, 9, 10], [-1, 0, 0, 2])
    node = tiny.target.decode(pool.tree_input([tree], [len(TOKENS)]), pool.cache).hidden
    return out | {f"{name} decode": tiny.logits(node)}


def main(rank: int, folder: str) -> None:
    """Join the group of two, compute, and leave the outputs in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        torch.save(outputs(TensorParallel(rank, 2)), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def single() -> dict[str, Tensor]:
    """The same on one rank."""
    return outputs(SINGLE)
