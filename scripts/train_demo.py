"""Train the demo model: a small DeepSeek-V3-architecture language model with its NextN (multi-token prediction) layer.

Three phases share one wall-clock budget and can be interrupted and resumed: `base` (short sequences, main loss plus
weighted NextN loss, auxiliary-loss-free expert balance), `long` (longer sequences, FP8-rounded weights through a
straight-through estimator) and `distill` (target frozen at its FP8 values, the NextN layer learns the target's
distribution over three recycled draft steps).
The result is exported in the official checkpoint format. Needs torch, tokenizers, safetensors and numpy only.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

BLOCK = 128  # rows and columns that share one FP8 scale
FP8_MAX = 448.0
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2


@dataclass(frozen=True)
class Config:
    """The fields of config.json that shape the model."""

    vocab_size: int = 4096
    hidden_size: int = 384
    num_hidden_layers: int = 7
    first_k_dense_replace: int = 2
    num_attention_heads: int = 8
    q_lora_rank: int = 256
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 896
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    original_positions: int = 1024
    yarn_factor: float = 32.0

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head dim) times YaRN's mscale squared."""
        mscale = 0.1 * math.log(self.yarn_factor) + 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale * mscale

    def to_json(self) -> dict[str, Any]:
        """config.json in the layout of DeepSeek-V3."""
        shape = {f.name: getattr(self, f.name) for f in fields(self)}
        original, factor = shape.pop("original_positions"), shape.pop("yarn_factor")
        return shape | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": int(original * factor),
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            },
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": factor,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": original,
                "type": "yarn",
            },
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


# ---------------------------------------------------------------- FP8


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] float -> e4m3 codes [out, in] and float32 scales [ceil(out/128), ceil(in/128)] (weight = code * scale)."""
    rows, columns = weight.shape
    pad_rows, pad_columns = -rows % BLOCK, -columns % BLOCK
    blocks = F.pad(weight.float(), (0, pad_columns, 0, pad_rows))
    blocks = blocks.view((rows + pad_rows) // BLOCK, BLOCK, (columns + pad_columns) // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(rows + pad_rows, columns + pad_columns)[:rows, :columns].contiguous(), scale


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse of quantize_blocks, float32 [out, in]."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


class Linear(nn.Linear):
    """A bias-free linear layer that is FP8 in the checkpoint; with `rounded` it computes with the rounded weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.rounded = False

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; the gradient passes the rounding straight through."""
        if not self.rounded:
            return F.linear(x, self.weight)
        detached = self.weight.detach()
        return F.linear(x, self.weight + (dequantize_blocks(*quantize_blocks(detached)) - detached))


# ---------------------------------------------------------------- model


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rope_table(config: Config, positions: int, device: torch.device) -> Tensor:
    """YaRN angles as cos and sin, float32 [2, positions, rope dim / 2]."""
    dim, base = config.qk_rope_head_dim, config.rope_theta
    index = torch.arange(dim // 2, dtype=torch.float32, device=device)
    plain = base ** (-2 * index / dim)

    def correction(turns: float) -> float:
        return dim * math.log(config.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction(32)), 0), min(math.ceil(correction(1)), dim - 1)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = plain / config.yarn_factor * ramp + plain * (1 - ramp)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate interleaved pairs: x [B, T, heads, dim], rope [2, T, dim / 2]."""
    cos, sin = rope[0][:, None], rope[1][:, None]  # [T, 1, dim / 2]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, unabsorbed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c, heads = config, config.num_attention_heads
        self.config = config
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank)
        self.q_b_proj = Linear(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size)

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, hidden] -> query and key [B, heads, T, nope + rope], value [B, heads, T, v]."""
        c, (b, t) = self.config, x.shape[:2]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, c.num_attention_heads, -1)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, c.num_attention_heads, -1)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_pe = rotate(k_pe[:, :, None], rope).expand(-1, -1, c.num_attention_heads, -1)
        q = torch.cat([q_nope, rotate(q_pe, rope)], -1)
        k = torch.cat([k_nope, k_pe], -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Scaled dot products; the value is padded to the key's width so that the fused kernels take it."""
        width = v.shape[-1]
        v = F.pad(v, (0, k.shape[-1] - width))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.config.softmax_scale)
        return self.merge(out[..., :width])

    def attend_draft(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Row i of a draft step sees the first step's rows 0..i and its own entries of the later steps."""
        scale, t = self.config.softmax_scale, q.shape[2]
        future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(future, -torch.inf)
        own = [(q.float() * k.float()).sum(-1, keepdim=True) for k in keys[1:]]
        weights = (torch.cat([scores, *own], -1) * scale).softmax(-1).to(q.dtype)
        out = weights[..., :t] @ values[0]
        for j, v in enumerate(values[1:]):
            out = out + weights[..., t + j : t + j + 1] * v
        return self.merge(out)

    def merge(self, out: Tensor) -> Tensor:
        """[B, heads, T, v] -> o_proj -> [B, T, hidden]."""
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DenseMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden] -> the same; no expert load."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None


class Router(nn.Module):
    """DeepSeek-V3's sigmoid router with group-limited top-k and a selection bias (noaux_tc), in float32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> expert weights [N, experts], zero for those not chosen."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        grouped = choice.unflatten(-1, (c.n_group, -1))  # [N, groups, experts per group]
        best = grouped.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)[..., None].expand_as(grouped).flatten(-2)
        chosen = choice.masked_fill(kept == 0, -torch.inf).topk(c.num_experts_per_tok, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, picked)


class MoE(nn.Module):
    """Routed experts and the shared one as a single wide SwiGLU whose columns are weighted expert by expert.

    Rows [e * I, (e + 1) * I) of gate_proj and up_proj (columns of down_proj) are expert e, the last I the shared one.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        wide = (config.n_routed_experts + 1) * config.moe_intermediate_size
        self.gate = Router(config)
        self.gate_proj = Linear(config.hidden_size, wide)
        self.up_proj = Linear(config.hidden_size, wide)
        self.down_proj = Linear(wide, config.hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden] -> the same, and how many tokens chose each expert [experts]."""
        weights = self.gate(x.flatten(0, -2))  # [N, experts]
        load = (weights > 0).sum(0)
        weights = F.pad(weights, (0, 1), value=1.0).view(*x.shape[:-1], -1, 1).to(x.dtype)
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        inner = inner.unflatten(-1, (weights.shape[-2], -1)) * weights.to(inner.dtype)
        return self.down_proj(inner.flatten(-2)), load


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config, moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | DenseMLP = MoE(config) if moe else DenseMLP(config)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor | None]:
        """Causal pass over [B, T, hidden]; also the expert load."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn.attend(q, k, v, causal=True))

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual MLP half."""
        out, load = self.mlp(self.post_attention_layernorm(x))
        return x + out, load

    def decode(self, x: Tensor, rope: Tensor, cache: tuple[Tensor, Tensor], at: int) -> Tensor:
        """One token a row, [B, 1, hidden]; keys and values are kept in the cache at index `at`."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        cache[0][:, :, at : at + 1], cache[1][:, :, at : at + 1] = k, v
        out = self.self_attn.attend(q, cache[0][:, :, : at + 1], cache[1][:, :, : at + 1], causal=False)
        return self.feed_forward(x + out)[0]

    def draft(
        self, x: Tensor, rope: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One recycled draft step for every row at once; returns the output and the step's own key and value."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        out = self.self_attn.attend_draft(q, [*keys, k], [*values, v])
        return self.feed_forward(x + out)[0], k, v


class NextN(nn.Module):
    """The multi-token-prediction layer; embedding and head are the target's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Block(config, moe=True)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embedding: Tensor, state: Tensor) -> Tensor:
        """Embedding of t_{i+1} first, state h_i second."""
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))

    def draft(
        self, embedding: Tensor, state: Tensor, rope: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One recycled step: state after shared_head.norm, and the step's key and value."""
        out, k, v = self.block.draft(self.join(embedding, state), rope, keys, values)
        return self.norm(out), k, v


class Model(nn.Module):
    """Target and NextN layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, moe=i >= config.first_k_dense_replace) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.nextn = NextN(config)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def target(self, ids: Tensor, rope: Tensor) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T] -> states after model.norm [B, T, hidden], and the expert loads of the MoE layers."""
        x, loads = self.embed_tokens(ids), []
        for layer in self.layers:
            x, load = layer(x, rope)
            if load is not None:
                loads.append(load)
        return self.norm(x), loads

    def draft(self, states: Tensor, following: Tensor, rope: Tensor) -> tuple[Tensor, Tensor | None]:
        """States h_i and tokens t_{i+1} [B, T] -> states after shared_head.norm, and the expert load."""
        out, load = self.nextn.block(self.nextn.join(self.embed_tokens(following), states), rope)
        return self.nextn.norm(out), load

    def routers(self) -> Iterator[Router]:
        """The routers of the target's MoE layers, then the NextN layer's."""
        for block in [*self.layers, self.nextn.block]:
            if isinstance(block.mlp, MoE):
                yield block.mlp.gate

    def round_weights(self, on: bool) -> None:
        """Compute with FP8-rounded weights from now on, or not."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.rounded = on


def official_names(config: Config, name: str, shape: torch.Size) -> tuple[list[str], int]:
    """Checkpoint names of one of our tensors, and the dimension along which they split it."""
    official = name if name.startswith("lm_head") else f"model.{name}"
    for ours in ("nextn.block.", "nextn.norm.", "nextn."):
        theirs = f"layers.{config.num_hidden_layers}." + ("shared_head.norm." if "norm." in ours else "")
        official = official.replace(f"model.{ours}", f"model.{theirs}")
    projections = ("gate_proj", "up_proj", "down_proj")
    projection = next((p for p in projections if name.endswith(f"mlp.{p}.weight")), "")
    if not projection or max(shape) != (config.n_routed_experts + 1) * config.moe_intermediate_size:
        return [official], 0
    experts = [*(f"experts.{e}" for e in range(config.n_routed_experts)), "shared_experts"]
    names = [official.replace(f"mlp.{projection}", f"mlp.{expert}.{projection}") for expert in experts]
    return names, int(projection == "down_proj")


def checkpoint_tensors(model: Model) -> dict[str, Tensor]:
    """All tensors under the official names, in the official dtypes."""
    tensors: dict[str, Tensor] = {}
    fp8 = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)}
    for name, weight in model.state_dict().items():
        names, dim = official_names(model.config, name, weight.shape)
        for official, part in zip(names, weight.chunk(len(names), dim), strict=True):
            if name in fp8:
                tensors[official], tensors[f"{official}_scale_inv"] = quantize_blocks(part)
            elif name.endswith("e_score_correction_bias"):
                tensors[official] = part.float().clone()
            else:
                tensors[official] = part.to(torch.bfloat16).clone()
    return tensors


def load_export(model: Model, directory: Path) -> None:
    """Take the weights of a checkpoint that `export` wrote, FP8 dequantised."""
    tensors = load_file(directory / "model.safetensors")

    def plain(official: str) -> Tensor:
        scale = tensors.get(f"{official}_scale_inv")
        return tensors[official].float() if scale is None else dequantize_blocks(tensors[official], scale)

    state = {}
    for name, weight in model.state_dict().items():
        names, dim = official_names(model.config, name, weight.shape)
        state[name] = torch.cat([plain(official) for official in names], dim)
    model.load_state_dict(state)


def export(model: Model, data: Path, output: Path) -> None:
    """Write a checkpoint directory: weights, configuration, tokenizer."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in checkpoint_tensors(model).items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    for name, content in (("config", model.config.to_json()), ("generation_config", generation)):
        (output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (data / name).exists():
            shutil.copy(data / name, output / name)


def deployed(model: Model, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A frozen copy in `dtype` with the values of the exported checkpoint (FP8 weights dequantised)."""
    with torch.device(model.lm_head.weight.device):
        copy = Model(model.config)
    copy.load_state_dict(model.state_dict())
    for module in copy.modules():
        if isinstance(module, Linear):
            module.weight.data = dequantize_blocks(*quantize_blocks(module.weight.data))
        elif isinstance(module, RMSNorm | nn.Embedding | nn.Linear | Router):
            module.weight.data = module.weight.data.bfloat16().float()
    biases = [router.e_score_correction_bias.clone() for router in copy.routers()]
    copy.to(dtype).requires_grad_(False)
    for router, bias in zip(copy.routers(), biases, strict=True):
        router.e_score_correction_bias = bias
    return copy


# ---------------------------------------------------------------- data


class Streams:
    """Token streams on the device; batches are a fixed function of (seed, step)."""

    def __init__(self, data: Path, split: str, device: torch.device) -> None:
        meta = json.loads((data / "meta.json").read_text())
        self.weights: dict[str, float] = meta["weights"]
        self.host = {name: self.load(data / f"{split}_{name}.npy.xz") for name in self.weights}
        self.tokens = {name: torch.from_numpy(a.astype(np.int32)).to(device) for name, a in self.host.items()}
        self.document_starts = {name: np.flatnonzero(a == BOS_ID) for name, a in self.host.items()}

    @staticmethod
    def load(path: Path) -> np.ndarray:
        """One uint16 array."""
        return np.load(io.BytesIO(lzma.decompress(path.read_bytes())))

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> Tensor:
        """[rows, length] int64 windows after a BOS; the rows are shared out over the streams by weight."""
        names = list(self.weights)
        share = np.array([self.weights[name] for name in names])
        counts = np.bincount(rng.choice(len(names), rows, p=share / share.sum()), minlength=len(names))
        picked = []
        for name, count in zip(names, counts, strict=True):
            stream = self.tokens[name]
            start = torch.from_numpy(rng.integers(0, len(stream) - length, count)).to(stream.device)
            picked.append(stream[start[:, None] + torch.arange(length, device=stream.device)])
        windows = torch.cat(picked).long()
        windows[:, 0] = BOS_ID
        return windows

    def prompts(self, rng: np.random.Generator, count: int, longest: int, assistant: int) -> list[list[int]]:
        """Beginnings of documents, questions up to the assistant's turn, and pieces of code out of the middle."""
        names = list(self.weights)
        share = np.array([self.weights[name] for name in names])
        found: list[list[int]] = []
        for choice in rng.choice(len(names), count, p=share / share.sum()):
            name, length = names[choice], int(rng.integers(longest // 12, longest // 2))
            stream = self.host[name]
            if name.startswith("code") and rng.random() < 0.5:
                start = int(rng.integers(0, len(stream) - longest))
                piece = [BOS_ID, *stream[start : start + length + longest // 3].tolist()]
            else:
                start = int(rng.choice(self.document_starts[name]))
                piece = stream[start : start + longest].tolist()
                turn = piece.index(assistant) + 1 if assistant in piece else length
                piece = piece[:turn]
            end = piece.index(EOS_ID) if EOS_ID in piece else len(piece)
            found.append(piece[: max(end, 2)])
        return found


# ---------------------------------------------------------------- generation


@torch.no_grad()
def generate(
    model: Model, prompts: list[list[int]], length: int, temperature: Tensor, generator: torch.Generator
) -> Tensor:
    """Continue each prompt up to `length` tokens in all. temperature [B], 0 is greedy. PAD after the end."""
    config, device = model.config, model.embed_tokens.weight.device
    dtype, count = model.lm_head.weight.dtype, len(prompts)
    ids = torch.full((count, length), PAD_ID, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(device)
    given = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rope = rope_table(config, length, device)
    heads, wide = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    caches = [
        (torch.zeros(count, heads, length, wide, dtype=dtype, device=device),
         torch.zeros(count, heads, length, config.v_head_dim, dtype=dtype, device=device))
        for _ in model.layers
    ]  # fmt: skip
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for at in range(length - 1):
        x = model.embed_tokens(ids[:, at : at + 1])
        for layer, cache in zip(model.layers, caches, strict=True):
            x = layer.decode(x, rope[:, at : at + 1], cache, at)
        logits = model.lm_head(model.norm(x))[:, 0].float()
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        token = (logits + temperature[:, None] * noise).argmax(-1)
        token = torch.where(done, PAD_ID, token)
        ids[:, at + 1] = torch.where(at + 1 < given, ids[:, at + 1], token)
        done |= (ids[:, at + 1] == EOS_ID) & (at + 1 >= given)
    return ids


def distinct_ratio(tokens: list[int], n: int = 4) -> float:
    """Distinct n-grams over n-grams."""
    grams = list(zip(*(tokens[k:] for k in range(n)), strict=False))
    return len(set(grams)) / max(len(grams), 1)


# ---------------------------------------------------------------- losses


def head_loss(weight: Tensor, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the head's prediction, and its argmax [B, T]."""
    logits = F.linear(states, weight)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits.detach().argmax(-1)


def distance(weight: Tensor, states: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """KL(target || draft) plus a little cross-entropy to the target's choice, over the first `valid` rows."""
    draft = F.linear(states[:, :valid], weight).float().log_softmax(-1)
    target = target[:, :valid].float().log_softmax(-1)
    choice = target.argmax(-1)
    kl = (target.exp() * (target - draft)).sum(-1).mean()
    hard = -draft.gather(-1, choice[..., None]).mean()
    return kl + 0.2 * hard, draft.detach().argmax(-1) == choice


# ---------------------------------------------------------------- optimiser


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched [n, rows, columns] (Muon)."""
    x = matrix.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices: Nesterov momentum, orthogonalised expert by expert, scaled to AdamW's update size."""

    def __init__(self, params: list[nn.Parameter], lr: float, expert_width: int, experts: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})
        self.expert_width, self.experts = expert_width, experts

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """[rows, columns] -> [n, rows, columns]: one matrix, or one for each expert."""
        wide = self.expert_width * self.experts
        if tensor.shape[0] == wide:
            return tensor.view(self.experts, self.expert_width, -1)
        if tensor.shape[1] == wide:
            return tensor.view(-1, self.experts, self.expert_width).transpose(0, 1)
        return tensor[None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter; equal shapes are orthogonalised in one batch."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = self.as_matrices(p.grad.lerp(momentum, group["momentum"]))
                shapes.setdefault((update.shape[1], update.shape[2]), []).append((self.as_matrices(p.data), update))
            for (rows, columns), pairs in shapes.items():
                batch = orthogonalize(torch.cat([update for _, update in pairs]))
                size = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
                for (weight, _), update in zip(pairs, batch.split([len(u) for _, u in pairs]), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(weight.dtype), alpha=-size)


def optimizers(model: Model, module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices of `module`, AdamW for embedding, head, routers and norms."""
    inner, outer = [], []
    for name, p in module.named_parameters():
        is_inner = p.dim() == 2 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name
        (inner if is_inner else outer).append(p)
    c = model.config
    adam = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=outer[0].is_cuda)
    return [Muon(inner, lr, c.moe_intermediate_size, c.n_routed_experts + 1), adam]


# ---------------------------------------------------------------- training


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors."""

    seconds: float = 0.0
    step: int = 0
    tokens: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Runs the three phases against one clock."""

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self.args, self.config = args, config
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = Model(config).to(self.device)
        self.rope = rope_table(config, args.long_length + 8, self.device)
        self.train, self.val = (Streams(args.data, split, self.device) for split in ("train", "val"))
        self.tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
        self.assistant = self.tokenizer.token_to_id("<｜Assistant｜>")
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.optimizers = optimizers(self.model, self.model, args.lr)
        self.progress, self.phase = Progress(), "base"
        self.frozen: Model | None = None
        self.pool: Tensor | None = None
        self.losses: dict[str, list[Tensor]] = {}
        self.process_start = self.clock = self.saved = time.monotonic()
        self.first_step = 0
        if args.checkpoint.exists():
            self.resume()
        elif args.init is not None:
            load_export(self.model, args.init)
            self.progress = Progress(seconds=args.init_seconds, step=round(args.init_seconds * 16))
            self.first_step = self.progress.step
        self.head_loss, self.distance = head_loss, distance
        self.draft_step = self.model.nextn.draft
        if args.compile:
            self.compile(args.compile)

    def compile(self, backend: str) -> None:
        """Compile layer by layer: all layers of a kind share one compilation."""
        torch._dynamo.config.recompile_limit = 64
        options: dict[str, Any] = {"dynamic": False, "backend": backend}
        for block in [*self.model.layers, self.model.nextn.block]:
            block.compile(**options)
        self.head_loss, self.distance, self.draft_step = (
            torch.compile(f, **options) for f in (head_loss, distance, self.model.nextn.draft)
        )

    # ---- state

    def resume(self) -> None:
        """Continue from the checkpoint file."""
        saved = torch.load(self.args.checkpoint, map_location=self.device, weights_only=False)
        self.progress, self.phase = saved["progress"], saved["phase"]
        self.model.load_state_dict(saved["model"])
        if self.phase != "base":
            self.enter(self.phase)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        print(f"resumed in phase {self.phase} at step {self.progress.step}, {self.progress.seconds:.0f} s", flush=True)

    def save(self) -> None:
        """Write the checkpoint file, atomically."""
        self.tick()
        state = {"progress": self.progress, "phase": self.phase, "model": self.model.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}  # fmt: skip
        temporary = self.args.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.args.checkpoint)
        self.saved = time.monotonic()

    def tick(self) -> float:
        """Add the time since the last call to the clock of the training; returns the clock."""
        now = time.monotonic()
        self.progress.seconds += now - self.clock
        self.clock = now
        return self.progress.seconds

    def due_phase(self) -> str:
        """The phase that the clock asks for."""
        joint, spent = self.args.joint_minutes * 60, self.progress.seconds
        if self.args.smoke:
            return ("base", "long", "distill", "end")[min((self.progress.step - self.first_step) // 4, 3)]
        if spent < joint * (1 - self.args.long_fraction):
            return "base"
        if spent < joint:
            return "long"
        return "distill" if spent < joint + self.args.distill_minutes * 60 else "end"

    def enter(self, phase: str) -> None:
        """Prepare the model for a phase."""
        self.phase = phase
        self.model.round_weights(phase in ("long", "distill"))
        if phase == "distill":
            self.frozen = deployed(self.model)
            if self.args.compile:
                for block in self.frozen.layers:
                    block.compile(dynamic=False, backend=self.args.compile)
            self.model.requires_grad_(False)
            self.model.nextn.requires_grad_(True)
            self.optimizers = optimizers(self.model, self.model.nextn, self.args.distill_lr)
            self.pool = None

    def prompts(self, streams: Streams, rng: np.random.Generator, count: int) -> list[list[int]]:
        """Prompts that leave about half of a rollout to the model."""
        return streams.prompts(rng, count, self.args.rollout_length * 11 // 20, self.assistant)

    # ---- one step of each phase

    def joint_loss(self, window: Tensor, mtp_weight: float) -> tuple[Tensor, list[Tensor]]:
        """Main loss plus weighted NextN loss on [B, T + 2] tokens; also the expert loads."""
        length = window.shape[1] - 2
        rope, head = self.rope[:, :length], self.model.lm_head.weight
        states, loads = self.model.target(window[:, :-2], rope)
        main, chosen = self.head_loss(head, states, window[:, 1:-1])
        drafts, load = self.model.draft(states, window[:, 1:-1], rope)
        mtp, drafted = self.head_loss(head, drafts, window[:, 2:])
        self.note(loss=main, mtp=mtp, agree=(drafted[:, :-1] == chosen[:, 1:]).float().mean())
        return main + mtp_weight * mtp, [*loads, load] if load is not None else loads

    def joint_step(self) -> None:
        """One optimiser step of the phases base and long."""
        args, long = self.args, self.phase == "long"
        part = min(self.progress.seconds / (args.joint_minutes * 60), 1.0)
        rng = np.random.default_rng([args.seed, self.progress.step])
        length = args.long_length if long else args.length
        window = self.train.windows(rng, args.batch_tokens // length, length + 2)
        self.set_lr(args.lr * min(1.0, (self.progress.step - self.first_step + 1) / 150, (1.0 - part) / 0.75 + 0.01))
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, loads = self.joint_loss(window, 0.3 if part < 0.67 else 0.1)
        loss.backward()
        self.update(window.numel())
        if not long:
            self.balance(loads)

    def distill_step(self) -> None:
        """One optimiser step of the NextN layer against the frozen target, on corpus text or the target's own."""
        args, length = self.args, self.args.distill_length
        assert self.frozen is not None
        spent = self.progress.seconds - args.joint_minutes * 60
        self.set_lr(args.distill_lr * (1.01 - min(spent / (args.distill_minutes * 60), 1.0)))
        rng = np.random.default_rng([args.seed, 2, self.progress.step])
        rows = args.batch_tokens // 2 // length
        if self.pool is None or (self.progress.step % 300 == 0 and len(self.pool) < 2**24):
            self.extend_pool(rng)
        window = self.train.windows(rng, rows // 3, length)
        assert self.pool is not None
        start = torch.from_numpy(rng.integers(0, len(self.pool) - length, rows - len(window))).to(self.device)
        window = torch.cat([window, self.pool[start[:, None] + torch.arange(length, device=self.device)]])
        with torch.no_grad():
            states = self.frozen.target(window, self.rope[:, :length])[0]
            logits = self.frozen.lm_head(states)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.distill_loss(window, states, logits)
        loss.backward()
        self.update(window.numel())

    def distill_loss(self, window: Tensor, states: Tensor, logits: Tensor, steps: int = 3) -> Tensor:
        """Sum over draft steps; step s reads t_{i+1+s} at position i + s and predicts t_{i+2+s}."""
        assert self.frozen is not None
        length, keys, values, total = window.shape[1], [], [], torch.zeros((), device=self.device)
        accepted: Tensor | None = None
        for s in range(steps):
            embedding = self.frozen.embed_tokens(window.roll(-s - 1, 1))
            states, k, v = self.draft_step(embedding, states, self.rope[:, s : s + length], list(keys), list(values))
            keys.append(k)
            values.append(v)
            loss, hit = self.distance(self.frozen.lm_head.weight, states, logits.roll(-s - 1, 1), length - steps)
            total = total + loss * (1.0, 0.8, 0.6)[s]
            accepted = hit if accepted is None else accepted & hit
            self.note(**{f"kl{s + 1}": loss, f"accept{s + 1}": accepted.float().mean()})
        return total

    def extend_pool(self, rng: np.random.Generator) -> None:
        """Let the frozen target write: three quarters greedily, the rest sampled; documents are kept end to end."""
        assert self.frozen is not None
        prompts = self.prompts(self.train, rng, self.args.rollouts)
        temperature = torch.where(torch.arange(len(prompts)) % 4 == 0, 0.8, 0.0).to(self.device)
        ids = generate(self.frozen, prompts, self.args.rollout_length, temperature, self.generator)
        fresh = ids[ids != PAD_ID]
        self.pool = fresh if self.pool is None else torch.cat([self.pool, fresh])

    def set_lr(self, lr: float) -> None:
        """The learning rate of all parameters."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def update(self, tokens: int) -> None:
        """Clip, step, count."""
        parameters = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += tokens

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: float = 0.001) -> None:
        """Auxiliary-loss-free balance: raise the bias of experts chosen too rarely, lower that of the others."""
        for router, load in zip(self.model.routers(), loads, strict=True):
            load = load.float()
            router.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    # ---- reporting

    def note(self, **values: Tensor) -> None:
        """Remember values for the next report."""
        for name, value in values.items():
            self.losses.setdefault(name, []).append(value.detach())

    def report(self, tokens: int, seconds: float) -> None:
        """Print and record the means since the last report."""
        args, p = self.args, self.progress
        means = {k: round(torch.stack(v).float().mean().item(), 4) for k, v in self.losses.items()}
        self.losses.clear()
        rate, left = tokens / max(seconds, 1e-9), (args.joint_minutes + args.distill_minutes) * 60 - p.seconds
        p.history.append({"phase": self.phase, "step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1)} | means)
        shown = " ".join(f"{k} {v:.3f}" for k, v in means.items())
        print(f"[{self.phase}] step {p.step} {p.tokens / 1e6:.0f}M tokens {shown} | {rate / 1e3:.0f}k tokens/s, "
              f"lr {self.optimizers[0].param_groups[0]['lr']:.1e}, ETA {left:.0f} s", flush=True)  # fmt: skip

    def validate(self) -> None:
        """Losses on held-out documents, with the phase's arithmetic."""
        if self.phase == "distill":
            return
        kept, self.losses = self.losses, {}
        long = self.phase == "long"
        length = self.args.long_length if long else self.args.length
        for i in range(4):
            window = self.val.windows(np.random.default_rng([7, i]), self.args.batch_tokens // length, length + 2)
            with torch.autocast(self.device.type, torch.bfloat16):
                self.joint_loss(window, 0.1)
        means = {f"val_{k}": round(torch.stack(v).float().mean().item(), 4) for k, v in self.losses.items()}
        self.losses = kept
        p = self.progress
        p.history.append({"phase": self.phase, "step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1)} | means)
        print("  held out:", means, flush=True)

    def samples(self, count: int = 192, shown: int = 8) -> None:
        """Greedy text from held-out prompts: show some, count loops, measure the draft on it."""
        frozen = deployed(self.model)
        prompts = self.prompts(self.val, np.random.default_rng(11), count)
        length = self.args.rollout_length
        ids = generate(frozen, prompts, length, torch.zeros(count, device=self.device), self.generator)
        given = torch.tensor([len(p) for p in prompts], device=self.device)
        written = [row[g:].tolist() for row, g in zip(ids, given.tolist(), strict=True)]
        written = [[t for t in row if t != PAD_ID] for row in written]
        ratios = sorted(distinct_ratio(row[:128]) for row in written)
        print(f"greedy text: median distinct 4-grams {ratios[count // 2]:.2f}, below 0.5: "
              f"{sum(r < 0.5 for r in ratios) / count:.1%}, ended: {sum(EOS_ID in r for r in written) / count:.1%}")  # fmt: skip
        with torch.no_grad():
            self.frozen, before, self.losses = frozen, self.frozen, {}
            rates = self.acceptance(frozen, ids, given)
            self.frozen = before
        print(f"draft steps accepted on it: {rates}, a chain of 3 emits {1 + sum(rates):.2f} a cycle", flush=True)
        self.progress.history.append({"phase": self.phase, "step": self.progress.step, "accept": rates})
        for i in range(shown):
            print(f"--- prompt: {self.tokenizer.decode(prompts[i][1:], skip_special_tokens=False)!r}\n"
                  f"    text: {self.tokenizer.decode(written[i], skip_special_tokens=False)!r}", flush=True)  # fmt: skip

    def acceptance(self, frozen: Model, ids: Tensor, given: Tensor, steps: int = 3) -> list[float]:
        """How often the first 1, 2, 3 chained draft tokens all equal the greedy text ids [B, T]."""
        length, keys, values, rates = ids.shape[1], [], [], []
        states = frozen.target(ids, self.rope[:, :length])[0]
        position = torch.arange(length, device=self.device)
        # Row i drafts t_{i+2} onwards: from the row whose next token is the first generated one, to the last real one.
        row = (position + 2 >= given[:, None] + 1) & (position + steps + 1 < (ids != PAD_ID).sum(1)[:, None])
        accepted = row
        for s in range(steps):
            embedding = frozen.embed_tokens(ids.roll(-s - 1, 1))
            states, k, v = frozen.nextn.draft(embedding, states, self.rope[:, s : s + length], keys, values)
            keys, values = [*keys, k], [*values, v]
            accepted = accepted & (frozen.lm_head(states).argmax(-1) == ids.roll(-s - 2, 1))
            rates.append(round((accepted.sum() / row.sum()).item(), 4))
        return rates

    # ---- main loop

    def run(self) -> None:
        """Train until the clock, or this process's share of it, has run out; then save, show and export."""
        args, mark, tokens = self.args, time.monotonic(), self.progress.tokens
        self.clock = time.monotonic()
        while (phase := self.due_phase()) != "end":
            if phase != self.phase:
                self.validate()
                self.save()
                self.enter(phase)
            self.distill_step() if phase == "distill" else self.joint_step()
            if self.progress.step % args.report_every == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                self.report(self.progress.tokens - tokens, now - mark)
                mark, tokens = now, self.progress.tokens
            if self.progress.step % args.validate_every == 0:
                self.validate()
            if time.monotonic() - self.saved > args.save_seconds:
                self.save()
            self.tick()
            if time.monotonic() - self.process_start > args.stop_minutes * 60:
                break
        self.validate()
        self.save()
        export(self.model, args.data, args.output)
        self.samples()
        (args.output / "history.json").write_text(json.dumps(self.progress.history))


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="directory that prepare_demo_data.py wrote")
    p.add_argument("--output", type=Path, required=True, help="directory for the exported checkpoint")
    p.add_argument("--checkpoint", type=Path, default=Path("demo-training.pt"), help="state to resume from and save to")
    p.add_argument("--joint-minutes", type=float, default=12.0, help="wall time of the phases base and long")
    p.add_argument("--long-fraction", type=float, default=0.15, help="share of the joint time for the phase long")
    p.add_argument("--distill-minutes", type=float, default=3.0, help="wall time of the phase distill")
    p.add_argument("--stop-minutes", type=float, default=1e9, help="save, export and leave after this long, to be resumed")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--distill-lr", type=float, default=2e-3, help="peak learning rate of the phase distill")
    p.add_argument("--length", type=int, default=1024, help="tokens a sequence in base")
    p.add_argument("--long-length", type=int, default=4096, help="tokens a sequence in long")
    p.add_argument("--distill-length", type=int, default=512, help="tokens a sequence in distill")
    p.add_argument("--batch-tokens", type=int, default=65536, help="tokens a step (half of it in distill)")
    p.add_argument("--rollouts", type=int, default=4096, help="texts the model writes at a time (a multiple of 64)")
    p.add_argument("--rollout-length", type=int, default=256, help="tokens of such a text, prompt included")
    p.add_argument("--init", type=Path, help="start from the weights of an exported checkpoint, with fresh optimisers")
    p.add_argument("--init-seconds", type=float, default=0.0, help="where on the clock a start from --init stands")
    p.add_argument("--report-every", type=int, default=50, help="steps between progress lines")
    p.add_argument("--validate-every", type=int, default=1000, help="steps between validations")
    p.add_argument("--save-seconds", type=float, default=90, help="seconds between checkpoints")
    p.add_argument("--compile", default="", metavar="BACKEND", help="torch.compile backend, such as inductor")
    p.add_argument("--smoke", action="store_true", help="four steps of each phase, to see that everything runs")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    p.add_argument("--config", default="{}", help="JSON object that overrides fields of the model's configuration")
    p.add_argument("--seed", type=int, default=1, help="seed of weights, batches and sampling")
    return p.parse_args()


def main() -> None:
    """Train and export."""
    args = arguments()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = Config(**json.loads(args.config))
    trainer = Trainer(args, config)
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{count / 1e6:.1f}M parameters, {sum(len(t) for t in trainer.train.host.values()) / 1e6:.0f}M tokens", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
