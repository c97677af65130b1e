"""Configuration as data: the model (from config.json), the tree's shape and the engine's sizes.

All three are frozen; a value that cannot work raises `ConfigError` with the value that would do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nextn.errors import CheckpointError, ConfigError

MAX_TREE_NODES = 64
"""Ancestor masks are one int64 a node, so a tree (or a draft step buffer) has at most 64 nodes."""

EXPORTED_ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
"""What config.json of an exported NextN layer calls it; SGLang knows it by this name too."""

MAX_ROWS = 4096
"""Requests that may run at once: each has a row of device memory, whether it is used or not."""

MAX_CACHE_TOKENS = 2**36
"""No machine's memory holds more; beyond it sizes would leave what torch can address."""

DraftHidden = Literal["post-norm", "pre-norm"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: plain (no original length) or YaRN; field names are those of config.json."""

    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    interleave: bool = True

    @property
    def is_yarn(self) -> bool:
        """Whether config.json asks for YaRN, which alone names the length that was trained first."""
        return self.original_max_position_embeddings > 0

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_theta` and `rope_scaling` (older files) or `rope_parameters` (transformers >= 5)."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(scaling["rope_theta"] if "rope_theta" in scaling else config["rope_theta"])
        if theta != float(config.get("rope_theta", theta)):
            raise CheckpointError(
                f"config.json gives rope_theta twice, as {config['rope_theta']} and {theta}; keep one"
            )
        interleave = bool(config.get("rope_interleave", True))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return RopeConfig(theta=theta, interleave=interleave)
        if kind != "yarn":
            raise CheckpointError(f"rope_scaling type {kind!r} is not supported; nextn reads 'yarn' or none")
        original = scaling.get("original_max_position_embeddings")
        if original is None or "factor" not in scaling:
            missing = "original_max_position_embeddings" if original is None else "factor"
            raise CheckpointError(f"rope_scaling of type yarn lacks {missing}")
        if scaling.get("attention_factor") is not None or scaling.get("truncate") is False:
            raise CheckpointError("rope_scaling sets attention_factor or truncate, which nextn does not read")
        return RopeConfig(
            theta=theta,
            factor=float(scaling["factor"]),
            original_max_position_embeddings=int(original),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            mscale=float(scaling.get("mscale", 1.0)),
            mscale_all_dim=float(scaling.get("mscale_all_dim", 0.0)),
            interleave=interleave,
        )


MAX_SIZE = 2**31 - 1
"""The most that any size in config.json may be: more is no model, and overflows what computes with it."""

MAX_BLOCK = 2**20
"""The longest side of a block of weights that share one FP8 scale."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a DeepSeek-V2/V3-family config.json that nextn computes with, by their own names.

    is_exported_draft: the directory holds a NextN layer alone, as `nextn-export` writes it.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: Literal["sigmoid", "softmax"]
    topk_method: Literal["noaux_tc", "greedy", "group_limited_greedy"]
    num_nextn_predict_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] = (128, 128)
    is_exported_draft: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_layer_freq",
            "n_group", "max_position_embeddings", "rms_norm_eps",
        )  # fmt: skip
        for name in sizes:
            if not 0 < getattr(self, name) <= MAX_SIZE:
                raise CheckpointError(
                    f"config.json: {name} is {getattr(self, name)}; it must be above 0 and at most {MAX_SIZE}"
                )
        for name in ("moe_intermediate_size", "n_routed_experts", "n_shared_experts"):
            if not 0 <= getattr(self, name) <= MAX_SIZE:
                raise CheckpointError(
                    f"config.json: {name} is {getattr(self, name)}; it must be 0 to {MAX_SIZE}"
                )
        if not all(1 <= side <= MAX_BLOCK for side in self.weight_block_size):
            raise CheckpointError(
                f"config.json: weight_block_size is {list(self.weight_block_size)}; each side must be 1 to "
                f"{MAX_BLOCK}"
            )
        if self.qk_rope_head_dim % 2:
            raise CheckpointError(f"config.json: qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        if not self.rope.theta > 0 or not self.rope.factor > 0:
            raise CheckpointError("config.json: rope_theta and the rope factor must be above 0")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise CheckpointError(
                f"config.json: q_lora_rank is {self.q_lora_rank}; it must be above 0 or null"
            )
        if self.n_routed_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        """Refuse a router that cannot choose as it is told to."""
        experts, groups = self.n_routed_experts, self.n_group
        if not 1 <= self.num_experts_per_tok <= experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} must be 1 to {experts}, "
                "the number of routed experts"
            )
        if self.moe_intermediate_size < 1:
            raise CheckpointError(f"config.json: moe_intermediate_size is {self.moe_intermediate_size}")
        if experts % groups or not 1 <= self.topk_group <= groups:
            raise CheckpointError(
                f"config.json: {experts} experts in {groups} groups, of which {self.topk_group} are kept, "
                "do not fit together"
            )
        if self.topk_method == "noaux_tc" and 1 < groups == experts:
            raise CheckpointError("config.json: topk_method noaux_tc needs groups of at least two experts")
        if self.topk_method != "greedy" and self.num_experts_per_tok > self.topk_group * experts // groups:
            raise CheckpointError(
                f"config.json: {self.topk_group} groups of {experts // groups} experts hold fewer than "
                f"num_experts_per_tok {self.num_experts_per_tok}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: the part without and the part with position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cache entry: latent and rotated key (576 for V3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_nextn(self) -> bool:
        """Whether the checkpoint announces a NextN layer to draft with."""
        return self.num_nextn_predict_layers > 0

    @property
    def nextn_layer(self) -> int:
        """Index of the NextN layer in this checkpoint's tensor names; always the cache's last layer."""
        return 0 if self.is_exported_draft else self.num_hidden_layers

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(qk_head_dim), times YaRN's mscale_all_dim correction squared (HF's rule)."""
        scale: float = self.qk_head_dim**-0.5
        if self.rope.is_yarn and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts; the NextN layer always has."""
        return self.n_routed_experts > 0 and (
            layer >= self.num_hidden_layers
            or (layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0)
        )

    @staticmethod
    def from_dir(path: Path) -> ModelConfig:
        """Read `path`/config.json; raises `CheckpointError` with a sentence when it is absent or unfit."""
        file = path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file} does not exist; give a checkpoint directory (for MODEL also 'demo')"
            ) from None
        except (OSError, ValueError, RecursionError) as error:  # no JSON, no UTF-8, or a number without end
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{file} must hold a JSON object")
        _refuse_side_file(path)
        return ModelConfig.from_dict(config)

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> ModelConfig:
        """Decide by fields, not by model_type; raises `CheckpointError` for what is not MLA + MoE."""
        try:
            _refuse_unsupported(config)
            return ModelConfig._read(config)
        except KeyError as error:
            raise CheckpointError(
                f"config.json lacks {error.args[0]!r}, which every DeepSeek-V2/V3-family model has"
            ) from None
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CheckpointError(f"config.json has a value of the wrong kind: {error}") from None

    @staticmethod
    def _read(config: Mapping[str, Any]) -> ModelConfig:
        """Take the fields as they stand; their own conversions raise on what they are not."""
        eos = config.get("eos_token_id")  # may be absent: the tokenizer names one too
        quantization = config.get("quantization_config") or {}
        block = quantization.get("weight_block_size") or (128, 128)
        scoring = config.get(
            "scoring_func", "sigmoid" if config.get("model_type") != "deepseek_v2" else "softmax"
        )
        method = config.get("topk_method", "noaux_tc" if scoring == "sigmoid" else "greedy")
        return ModelConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=int(config["num_attention_heads"]),
            q_lora_rank=int(config["q_lora_rank"]) if config["q_lora_rank"] is not None else None,
            kv_lora_rank=int(config["kv_lora_rank"]),
            qk_nope_head_dim=int(config["qk_nope_head_dim"]),
            qk_rope_head_dim=int(config["qk_rope_head_dim"]),
            v_head_dim=int(config["v_head_dim"]),
            intermediate_size=int(config["intermediate_size"]),
            moe_intermediate_size=int(config.get("moe_intermediate_size") or 0),
            first_k_dense_replace=int(config.get("first_k_dense_replace", 0)),
            moe_layer_freq=int(config.get("moe_layer_freq", 1)),
            n_routed_experts=int(config.get("n_routed_experts") or 0),
            n_shared_experts=int(config.get("n_shared_experts") or 0),
            num_experts_per_tok=int(config.get("num_experts_per_tok") or 0),
            n_group=int(config.get("n_group") or 1),
            topk_group=int(config.get("topk_group") or 1),
            norm_topk_prob=bool(config.get("norm_topk_prob", scoring == "sigmoid")),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            scoring_func=scoring,
            topk_method=method,
            num_nextn_predict_layers=int(
                config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
            ),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope=RopeConfig.from_dict(config),
            eos_token_ids=tuple(int(token) for token in _as_list(eos)),
            weight_block_size=(int(block[0]), int(block[1])),
            is_exported_draft=EXPORTED_ARCHITECTURE in (config.get("architectures") or ()),
        )


def _as_list(value: Any) -> list[Any]:
    """None, one value or several, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


_FAMILY = "nextn runs DeepSeek-V2-Lite, V2, V3, R1, V3.1 and Kimi-K2 checkpoints"


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Name the reason why a checkpoint of another family cannot run here, and what can."""
    kind = config.get("model_type", "?")
    if "text_config" in config:
        raise CheckpointError(
            f"model_type {kind!r} nests a text_config, so it reads more than text, which is not supported; "
            f"{_FAMILY}"
        )
    if "index_topk" in config or "index_n_heads" in config:
        raise CheckpointError(
            f"model_type {kind!r} uses sparse attention (an indexer), which is not supported; {_FAMILY}"
        )
    if "kv_lora_rank" not in config:
        raise CheckpointError(
            f"model_type {kind!r} has no kv_lora_rank: its attention is not MLA, which alone is supported; "
            f"{_FAMILY}"
        )
    if config.get("attention_bias"):
        raise CheckpointError("attention_bias is true; no DeepSeek-V3-family checkpoint has biases")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    if config.get("scoring_func", "sigmoid") not in ("sigmoid", "softmax"):
        raise CheckpointError(f"scoring_func {config['scoring_func']!r} is not supported")
    if config.get("topk_method", "noaux_tc") not in ("noaux_tc", "greedy", "group_limited_greedy"):
        raise CheckpointError(f"topk_method {config['topk_method']!r} is not supported")
    if config.get("tie_word_embeddings"):
        raise CheckpointError("tie_word_embeddings is true, which is not supported")
    _refuse_quantization(config.get("quantization_config") or {})
    if int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0) > 1:
        raise CheckpointError("num_nextn_predict_layers is above 1; one NextN layer is supported")


def _refuse_quantization(quantization: Mapping[str, Any]) -> None:
    """Refuse every way of quantising but FP8 e4m3 with a scale a block and activations as they come."""
    if not quantization:
        return
    method, found = quantization.get("quant_method", "fp8"), ""
    if method != "fp8":
        algorithm = quantization.get("quant_algo") or quantization.get("format")
        found = f"quant_method {method!r}" + (f" ({algorithm})" if algorithm else "")
    elif not quantization.get("weight_block_size"):
        found = "FP8 with one scale a tensor (no weight_block_size)"
    elif quantization.get("fmt", "e4m3") != "e4m3":
        found = f"FP8 of the format {quantization['fmt']!r}"
    elif quantization.get("activation_scheme", "dynamic") != "dynamic":
        found = f"FP8 with the activation_scheme {quantization['activation_scheme']!r}"
    if found:
        raise CheckpointError(
            f"{found} is not supported; nextn reads block FP8, bf16 and fp32: use the model's original "
            "checkpoint, or one converted to bf16"
        )


def _refuse_side_file(path: Path) -> None:
    """ModelOpt's exports may say in a file of their own, and nowhere else, how they are quantised."""
    file = path / "hf_quant_config.json"
    if file.is_file():
        try:
            algorithm = json.loads(file.read_text(encoding="utf-8"))["quantization"]["quant_algo"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            algorithm = "an algorithm that it does not name"
        _refuse_quantization({"quant_method": "modelopt", "quant_algo": algorithm})


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention magnitude m(F, a) = 0.1 a ln F + 1 (1 when F <= 1)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Shape of the draft tree.

    num_steps S: levels of the tree, so the draft's depth. topk k: children kept a node, and the beam.
    draft_tokens D: tokens verified a cycle, the root included. 1 <= D-1 <= k + (S-1)k^2; k = 1 is a
    chain and D = S+1.
    """

    num_steps: int = 2
    topk: int = 4
    draft_tokens: int = 4

    def __post_init__(self) -> None:
        s, k, d = self.num_steps, self.topk, self.draft_tokens
        if s < 1:
            raise ConfigError(f"--num-steps {s} drafts nothing; use 1 or more, or --spec off")
        if k < 1:
            raise ConfigError(f"--topk {k} keeps no child; use 1 or more")
        if d < 2:
            raise ConfigError(f"--draft-tokens {d} leaves no token to verify; use 2 or more, or --spec off")
        if d > MAX_TREE_NODES:
            raise ConfigError(f"--draft-tokens {d} is above {MAX_TREE_NODES}, the most nodes a tree may have")
        if k * (s - 1) > MAX_TREE_NODES:
            most = MAX_TREE_NODES // k + 1
            raise ConfigError(
                f"--num-steps {s} with --topk {k} needs {k * (s - 1)} draft entries, above {MAX_TREE_NODES}; "
                f"use --num-steps {most} or less"
            )
        if k == 1 and d != s + 1:
            raise ConfigError(
                f"--topk 1 is a chain, so --draft-tokens must be {s + 1} (num-steps + 1), not {d}"
            )
        if d - 1 > self.pool_size:
            raise ConfigError(
                f"--draft-tokens {d} is more than the tree can hold: --num-steps {s} --topk {k} drafts "
                f"{self.pool_size} tokens, so use --draft-tokens "
                f"{min(self.pool_size + 1, MAX_TREE_NODES)} or less"
            )

    @property
    def pool_size(self) -> int:
        """Candidates drafted a cycle: k + (S-1) k^2."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def width(self) -> int:
        """Most tokens that a cycle can emit: accepted draft tokens and the bonus."""
        return min(self.num_steps, self.draft_tokens - 1) + 1

    @staticmethod
    def parse(text: str) -> SpecConfig:
        """Read `S/k/D`, e.g. 2/4/4."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ConfigError(f"{text!r} is not a tree shape; write steps/topk/draft-tokens, such as 2/4/4")
        return SpecConfig(*(int(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.draft_tokens}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and choices of one engine. `None` means: chosen from the model and the machine at start.

    spec: the tree's shape, or None for plain decoding. draft_model: directory to take the NextN layer from,
    instead of the model's own. draft_hidden: target states that the draft reads, after or before model.norm.
    max_model_len: most tokens of a request, prompt and output together. page_size: tokens a cache page.
    mem_fraction: share of a GPU's memory that may be in use in all, other processes included. prefix_cache:
    whether pages of earlier requests serve those that begin alike. max_waiting_requests: what a server lets
    wait; an engine by itself queues any number. chunked_prefill_size: most tokens a prefill step.
    max_prefill_ms: about how long a prefill step may take while other requests decode; 0 is no limit. seed:
    of random (dummy) weights. max_draft_tokens: largest D that `spec` may be changed to later; 0 adds nothing
    to `spec` itself. cuda_graphs: in bfloat16 on a GPU, record each decode step once and replay it.
    """

    device: str = "auto"
    dtype: str = "auto"
    spec: SpecConfig | None = field(default_factory=SpecConfig)
    draft_model: str | None = None
    draft_hidden: DraftHidden = "post-norm"
    coupled_drafting: bool = True
    max_model_len: int | None = None
    max_running_requests: int = 16
    max_waiting_requests: int = 1024
    page_size: int = 64
    num_pages: int | None = None
    mem_fraction: float = 0.85
    prefix_cache: bool = True
    chunked_prefill_size: int = 2048
    max_prefill_ms: float = 210.0
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    seed: int = 0
    max_draft_tokens: int = 0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _at_least("--max-running-requests", self.max_running_requests, 1)
        if self.max_running_requests > MAX_ROWS:
            raise ConfigError(
                f"--max-running-requests {self.max_running_requests} must be at most {MAX_ROWS}"
            )
        _at_least("--max-waiting-requests", self.max_waiting_requests, 1)
        _at_least("--page-size", self.page_size, 1)
        _at_least("--chunked-prefill-size", self.chunked_prefill_size, 1)
        if not 0.0 <= self.max_prefill_ms < math.inf:
            raise ConfigError(f"--max-prefill-ms {self.max_prefill_ms} must be at least 0, which is no limit")
        if self.num_pages is not None:
            _at_least("--num-pages", self.num_pages, 1)
        if (self.num_pages or 1) * self.page_size > MAX_CACHE_TOKENS:
            raise ConfigError(f"--num-pages x --page-size must be at most {MAX_CACHE_TOKENS} tokens")
        if self.max_model_len is not None:
            _at_least("--max-model-len", self.max_model_len, 2)
        if not 0.0 < self.mem_fraction <= 1.0:
            raise ConfigError(f"--mem-fraction {self.mem_fraction} must be above 0 and at most 1")
        if self.dtype not in ("auto", "float64", "float32", "bfloat16"):
            raise ConfigError(f"--dtype {self.dtype!r} must be auto, float64, float32 or bfloat16")
        if self.draft_hidden not in ("post-norm", "pre-norm"):
            raise ConfigError(f"--draft-hidden {self.draft_hidden!r} must be post-norm or pre-norm")
        if self.load_format not in ("safetensors", "dummy"):
            raise ConfigError(f"--load-format {self.load_format!r} must be safetensors or dummy")

    @property
    def largest_tree(self) -> int:
        """Slots to reserve beyond a row's length: the largest D in use (1 for plain decoding)."""
        return max(self.max_draft_tokens, self.spec.draft_tokens if self.spec else 1)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} {value} must be at least {least}")
