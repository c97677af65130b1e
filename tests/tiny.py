"""A tiny random model whose draft often agrees with its target, and an engine around it.

Random drafts of an ordinary random model are almost never accepted, which would hide most faults. Here the
vocabulary is small and every residual branch is weak, so the next token depends mostly on the current one,
and NextN's eh_proj passes the embedding through: target and draft agree often, but far from always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch

from nextn.config import EngineConfig, ModelConfig
from nextn.engine.engine import Engine
from nextn.engine.request import Output, Request, SamplingParams
from nextn.engine.state import RowState
from nextn.engine.step import StepOptions
from nextn.engine.worker import Worker
from nextn.models.deepseek import DeepseekModel
from nextn.models.mtp import NextN
from nextn.models.specs import TensorSpec
from nextn.models.weights import Models

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 40,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@cache
def tiny_models(seed: int = 0, dtype: torch.dtype = torch.float64, device_name: str = "cpu") -> Models:
    """Target and NextN with weights drawn from `seed`; shared between tests, nobody changes them."""
    cfg = ModelConfig.from_dict(TINY)
    device = torch.device(device_name)
    target = DeepseekModel(cfg, dtype=dtype, device=device, keep_fp8=False, max_positions=1200)
    nextn = NextN(cfg, target, dtype=dtype, device=device, keep_fp8=False)
    generator = torch.Generator().manual_seed(seed)
    for spec in chain(target.specs(), nextn.specs()):
        spec.load(_random_tensor(spec, generator), None)
    return Models(target, nextn, cfg)


def _random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    if spec.kind == "norm":
        return 1.0 + 0.1 * noise
    if spec.kind == "bias":
        return 0.1 * noise
    if spec.name.endswith("eh_proj.weight"):
        hidden = spec.shape[0]
        through = torch.cat((torch.eye(hidden), 0.3 * torch.eye(hidden)), dim=1).double()
        return through + 0.02 * noise
    weak = spec.name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = (0.15 if weak else 1.0) * (1.0 if spec.kind == "embedding" else spec.shape[-1] ** -0.5)
    return scale * noise * (2.5 if spec.name == "lm_head.weight" else 1.0)


def tiny_engine(models: Models | None = None, options: StepOptions | None = None, **config: Any) -> Engine:
    """An engine on `models`, its cache full of NaN; keyword arguments are fields of EngineConfig."""
    models = models or tiny_models()
    example = models.target.embed_tokens.weight
    config = {
        "device": str(example.device),
        "num_pages": 128,
        "page_size": 16,
        "max_model_len": 512,
        **config,
    }
    engine_config = EngineConfig(**config)
    state = RowState(
        models.cfg,
        max_rows=engine_config.max_running_requests,
        max_len=config["max_model_len"] + 2 * engine_config.largest_tree,
        num_pages=config["num_pages"],
        page_size=engine_config.page_size,
        dtype=example.dtype,
        device=example.device,
    )
    state.cache.fill_(float("nan"))
    options = options or StepOptions(coupled=engine_config.coupled_drafting)
    return Engine(Worker(models, state, options, config["max_model_len"]), engine_config, None, frozenset())


def prompt_of(length: int, seed: int) -> list[int]:
    """`length` random token ids above the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, TINY["vocab_size"], (length,), generator=generator).tolist()


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Add all requests, step to the end, check integrity after every step; token ids by request id."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for output in drain(engine):
        tokens[output.request_id] += output.token_ids
    return tokens


def drain(engine: Engine) -> Iterator[Output]:
    """Step until nothing is open; every request must end exactly once and leave no page behind."""
    ended: set[str] = set()
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in ended, "an output came after the final one"
            if output.finish_reason is not None:
                ended.add(output.request_id)
            yield output
        engine.check_integrity()
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nobody runs: free and cached pages are all there are."""
    engine.check_integrity()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_used"]) == (0, 0, 0)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages"]


def poison_freed_pages(engine: Engine) -> None:
    """Fill a page with NaN when its last holder gives it back: whoever still reads it shows."""
    release = engine.pool.release

    def poison(pages: Iterable[int]) -> None:
        for page in tuple(pages):
            release((page,))
            if engine.pool.references(page) == 0:
                engine.worker.state.cache[:, page] = float("nan")

    engine.pool.release = poison  # type: ignore[method-assign]


def tokens_of(outputs: Iterable[Output]) -> dict[str, list[int]]:
    """Token ids by request id."""
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def request(name: str, prompt: list[int], **params: Any) -> Request:
    """A request that ignores EOS unless told otherwise."""
    return Request(name, prompt, SamplingParams(**{"ignore_eos": True, **params}))
