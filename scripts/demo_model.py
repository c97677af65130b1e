"""A small trainable DeepSeek-V3 with its NextN layer in plain PyTorch, its FP8 rounding and its export.

The mathematics is that of transformers' DeepseekV3ForCausalLM: multi-head latent attention with interleaved
YaRN rotation, sigmoid router with group-limited top-k and a selection bias, and the multi-token-prediction
layer that reads the normed state h_i and the embedding of t_{i+1}.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
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
    """[out, in] float -> e4m3 codes, float32 scales [ceil(out/128), ceil(in/128)]; weight = code * scale."""
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
    """A linear layer without bias, FP8 in the checkpoint; `rounded` computes with the rounded weights."""

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
        kept = (
            torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)[..., None].expand_as(grouped).flatten(-2)
        )
        chosen = choice.masked_fill(kept == 0, -torch.inf).topk(c.num_experts_per_tok, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, picked)


class MoE(nn.Module):
    """Routed experts and the shared one as a single wide SwiGLU whose columns are weighted expert by expert.

    Rows [e * I, (e + 1) * I) of gate_proj and up_proj (columns of down_proj) are expert e, the last I the
    shared one.
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
        """One recycled draft step for every row at once: the output, and the step's own key and value."""
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
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
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


# ---------------------------------------------------------------- generation


def repeats(ids: Tensor, given: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """What would repeat an n-gram: (row, position, token) where `token` after ids[row, : position + 1]
    completes an n-gram that has already ended among the row's generated tokens (index >= given[row]).
    """
    length = ids.shape[1]
    same = ids[:, :, None] == ids[:, None, :]  # [B, T, T]
    run = same
    for k in range(1, n - 1):
        run = run & F.pad(same[:, : length - k, : length - k], (k, 0, k, 0))
    position = torch.arange(length, device=ids.device)
    run = run & (position[None, :] < position[:, None]) & (position + 1 >= given[:, None, None])
    row, at, earlier = run.nonzero(as_tuple=True)
    return row, at, ids[row, earlier + 1]


def without_repeats(logits: Tensor, ids: Tensor, given: Tensor, at: int, n: int) -> Tensor:
    """The logits [B, vocab] after ids[:, : at + 1] without the tokens that would repeat an n-gram."""
    if at < n:
        return logits
    suffix = ids[:, None, at - n + 2 : at + 1]  # [B, 1, n - 1]
    found = (ids[:, :at].unfold(1, n - 1, 1) == suffix).all(-1)
    found &= torch.arange(found.shape[1], device=ids.device) + n - 1 >= given[:, None]
    row, start = found.nonzero(as_tuple=True)
    logits[row, ids[row, start + n - 1]] = -torch.inf
    return logits


@torch.no_grad()
def generate(
    model: Model,
    prompts: list[list[int]],
    length: int,
    temperature: Tensor,
    generator: torch.Generator,
    no_repeat: int = 0,
) -> Tensor:
    """Continue each prompt up to `length` tokens in all, PAD after the end.

    temperature [B], 0 is greedy; no_repeat > 0 forbids generated n-grams of that size to come twice.
    """
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
        if no_repeat:
            logits = without_repeats(logits, ids, given, at, no_repeat)
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        token = (logits + temperature[:, None] * noise).argmax(-1)
        token = torch.where(done, PAD_ID, token)
        ids[:, at + 1] = torch.where(at + 1 < given, ids[:, at + 1], token)
        done |= (ids[:, at + 1] == EOS_ID) & (at + 1 >= given)
    return ids
