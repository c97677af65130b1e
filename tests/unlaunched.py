"""An engine as a GPU has it, on a machine without one: no kernel is compiled or launched.

All that kernels would write is 0, so tokens are too; what the host plans, allocates and asks of Triton is
what it would be. It needs a process without TRITON_INTERPRET: `in_process` starts one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.compile_check import hopper_driver

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
"""DeepSeek-V3's numbers of experts and heads on narrow layers."""
V2: dict[str, Any] = {
    **{name: value for name, value in V3.items() if name != "quantization_config"},
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
    "norm_topk_prob": False, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "topk_method": "group_limited_greedy", "num_nextn_predict_layers": 0,
}  # fmt: skip


def in_process(module: str, *args: str) -> Any:
    """What `python -m MODULE ARGS` prints, read as JSON; raises with that process's errors."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{done.stderr}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def no_launches(note: Callable[[str, str], None] = lambda name, key: None) -> Iterator[None]:
    """Inside, tensors on the CPU count as a GPU's. note: called with each launch's kernel and variant.

    What it changes it leaves changed: it is for a process of its own.
    """
    import triton

    from nextn.kernels import ops
    from nextn.kernels.ref.tree_ops import accept_path
    from nextn.tree import accept

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        note(fn.name, key)
        return True  # there is no need to compile it

    torch.set_num_threads(1)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, _zeroing(getattr(owner, name)))
    ops.on_gpu = lambda x: True
    accept.accept_path = accept_path  # at least one token of every row, whoever chose it
    triton.knobs.runtime.jit_cache_hook = hook
    with hopper_driver():
        yield


LARGE = 64 << 20
"""Bytes from which the system hands out fresh pages, which are 0, and takes memory only as they are used."""


def _zeroing(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor if tensor.nbytes >= LARGE else tensor.zero_()

    return zeroed


def engine_of(config: dict[str, Any], max_len: int, **settings: Any) -> Any:
    """An engine with room for `max_len` tokens; further settings are fields of `EngineConfig`."""
    from nextn.config import ModelConfig
    from nextn.models.deepseek import DeepseekModel
    from nextn.models.mtp import NextN
    from nextn.models.weights import Models
    from tests.tiny import tiny_engine

    cfg = ModelConfig.from_dict(config)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "keep_fp8": True}
    target = DeepseekModel(cfg, **how, max_positions=max_len + 256)
    nextn = NextN(cfg, target, **how) if cfg.num_nextn_predict_layers else None
    settings = {"max_model_len": max_len, "num_pages": max_len // 64 + 8, "page_size": 64, **settings}
    return tiny_engine(Models(target, nextn, cfg), **settings)
