"""Which kernels an engine on a GPU would have to compile while it serves, found on a machine without one.

`python -m tests.launch_keys MODEL` builds an engine with the numbers of experts and heads of that model on
narrow layers, lets it warm up, then gives it prompts of many lengths. Triton is asked for its specialisations
alone: nothing is compiled or launched, so all results are zeros. It prints, as JSON, the kernels of which a
prompt asked for a variant that the warm-up had not, with the lengths. It needs a process without
TRITON_INTERPRET, hence `late_kernels`, which starts one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.compile_check import hopper_driver

CHUNK = 2000
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512,
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16, "q_lora_rank": 128,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 512, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
V2: dict[str, Any] = {
    **{name: value for name, value in V3.items() if name != "quantization_config"},
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
    "norm_topk_prob": False, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "topk_method": "group_limited_greedy", "num_nextn_predict_layers": 0,
}  # fmt: skip
MODELS = {"v3": V3, "v2": V2}


def late_kernels(model: str) -> dict[str, list[int]]:
    """Kernels that a request to one of MODELS would wait for, and the prompt lengths that ask for them."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch_keys", model],
        cwd=Path(__file__).resolve().parent.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"tests.launch_keys failed:\n{done.stderr}")
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def main() -> None:
    """Warm an engine up, then note what prompts of other lengths ask for besides."""
    import triton

    from nextn.kernels import ops

    torch.set_num_threads(1)
    torch.empty = torch.zeros  # results that nobody computes are token ids, too
    ops.on_gpu = lambda x: True
    asked: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        asked.add((fn.name, key))
        return True  # there is no need to compile it

    triton.knobs.runtime.jit_cache_hook = note
    with hopper_driver():
        engine = _engine(MODELS[sys.argv[1]])
        engine.warm_up()
        known, late = set(asked), {}
        for length in _lengths():
            asked.clear()
            _prefill(engine, length)
            for name, _ in asked - known:
                late.setdefault(name, []).append(length)
    print(json.dumps(late))


def _engine(config: dict[str, Any]) -> Any:
    from nextn.config import ModelConfig
    from nextn.models.deepseek import DeepseekModel
    from nextn.models.mtp import NextN
    from nextn.models.weights import Models
    from tests.tiny import tiny_engine

    cfg, positions = ModelConfig.from_dict(config), 16 * CHUNK
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "keep_fp8": True}
    target = DeepseekModel(cfg, **how, max_positions=positions + 64)
    nextn = NextN(cfg, target, **how) if cfg.num_nextn_predict_layers else None
    return tiny_engine(
        Models(target, nextn, cfg),
        max_model_len=positions, num_pages=positions // 64 + 8, page_size=64, chunked_prefill_size=CHUNK,
    )  # fmt: skip


def _prefill(engine: Any, length: int) -> None:
    from nextn.engine.request import Request, SamplingParams

    engine.add(Request(str(length), [0] * length, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    engine.scheduler.cache.clear()


def _lengths() -> list[int]:
    """Short ones, the edges of every power of two, and others; some take several chunks."""
    draw = random.Random(0)
    edges = [(1 << bit) + off for bit in range(5, 11) for off in (-1, 0, 1, 16)]
    return sorted({*range(1, 19), *edges, CHUNK, *draw.sample(range(20, CHUNK), 30), 9 * CHUNK + 640})


if __name__ == "__main__":
    main()
