"""Multi-head latent attention (DeepSeek-V2 report, section 2.1): naive for prefill, absorbed for decode.

The cache holds, for each token, its normalised latent and its rotated shared key. A plan is what one forward
pass shares between its layers: rotary factors, visibility and where latents go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nextn.config import ModelConfig, yarn_mscale
from nextn.kernels.ops import write_latents
from nextn.kernels.ref.attention import TreeView, prefill_attention, tree_attention, tree_view
from nextn.kernels.ref.gemm import dequantize
from nextn.kernels.ref.rope import apply_rope, plain_frequencies, rope_rows, rope_table, yarn_frequencies
from nextn.models.inputs import DraftInput, PrefillInput, TreeInput
from nextn.models.parallel import (
    Linear,
    Placement,
    RMSNorm,
    check_fp8_shard,
    check_part,
    column_parallel,
    frozen,
    replicated,
    row_parallel,
)
from nextn.models.specs import TensorSpec

LATENT_NORM_EPS = 1e-6
"""Of q_a_layernorm and kv_a_layernorm: the models' own code leaves it at this default and applies
rms_norm_eps to the layer norms only, which differs for configurations with 1e-5."""


class Rotary:
    """The rotary tables of one model, in float64 or float32; not part of any checkpoint."""

    def __init__(self, cfg: ModelConfig, max_positions: int, place: Placement) -> None:
        rope, dim = cfg.rope, cfg.qk_rope_head_dim
        if rope.is_yarn:
            frequencies = yarn_frequencies(
                dim,
                rope.theta,
                factor=rope.factor,
                original_max_positions=rope.original_max_position_embeddings,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
            )
        else:
            frequencies = plain_frequencies(dim, rope.theta)
        multiplier = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
        self.interleave = rope.interleave
        self.cos, self.sin = rope_table(
            frequencies, multiplier, max_positions, dtype=place.dtype, device=place.device
        )  # [max_positions, rope / 2]

    def rows(self, positions: Tensor) -> RotaryRows:
        """Factors at positions [...], flattened to N tokens."""
        cos, sin = rope_rows(self.cos, self.sin, positions.flatten(), interleave=self.interleave)
        return RotaryRows(cos, sin, self.interleave)


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Rotary factors of the N tokens of one forward pass."""

    cos: Tensor  # [N, 1, rope]
    sin: Tensor  # [N, 1, rope]
    interleave: bool

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [N, heads, rope]."""
        return apply_rope(x, self.cos, self.sin, interleave=self.interleave)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A prefill's input with its rotary factors."""

    inp: PrefillInput
    rotary: RotaryRows


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A decode's input with its rotary factors and its visibility."""

    inp: TreeInput | DraftInput
    rotary: RotaryRows
    view: TreeView
    valid: Tensor | None  # [N] bool; None when every node is known to be valid

    @property
    def shape(self) -> tuple[int, int]:
        """B rows of M nodes."""
        rows, nodes = self.inp.tokens.shape
        return rows, nodes

    def clean(self, x: Tensor) -> Tensor:
        """x [B, M, hidden] flattened to tokens, with zeros for invalid nodes, whatever they held."""
        x = x.flatten(0, 1)
        return x if self.valid is None else torch.where(self.valid.unsqueeze(-1), x, 0)

    def store(self, latents: Tensor, cache_layer: Tensor) -> Tensor:
        """Write latents [N, C] where the input says and return the tail to attend.  # [B, E, C]"""
        inp, new = self.inp, latents.view(*self.shape, -1)
        if isinstance(inp, DraftInput):
            end = inp.start + self.shape[1]
            inp.tail[:, inp.start : end] = new
            return inp.tail[:, :end]
        write_latents(cache_layer, inp.slots.flatten(), latents, self.valid)
        return new


def plan_prefill(inp: PrefillInput, rotary: Rotary) -> PrefillPlan:
    """What a prefill's layers share."""
    return PrefillPlan(inp, rotary.rows(inp.positions))


def plan_decode(inp: TreeInput | DraftInput, rotary: Rotary, cache: Tensor) -> DecodePlan:
    """What a decode's layers share; `cache` [L, pages, page_size, C] gives page size and dtype."""
    tail_len, valid = inp.tokens.shape[1], None
    if isinstance(inp, DraftInput):
        tail_len += inp.start
    else:
        valid = inp.valid.flatten()
    sizes = {"page_size": cache.shape[2], "tail_len": tail_len}
    view = tree_view(inp.page_table, inp.prefix_lens, inp.mask, dtype=cache.dtype, **sizes)
    if valid is not None and not valid.is_cuda and bool(valid.all()):
        valid = None  # nothing to mask; on a GPU the question would cost a synchronisation
    return DecodePlan(inp, rotary.rows(inp.positions), view, valid)


class MLA(nn.Module):
    """Attention of one layer over this rank's heads."""

    def __init__(self, cfg: ModelConfig, prefix: str, place: Placement) -> None:
        super().__init__()
        self.place, self.tp = place, place.tp
        self.nope, self.rope_dim, self.kv_lora = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.kv_lora_rank
        self.v_dim, self.q_lora, self.scale = cfg.v_head_dim, cfg.q_lora_rank, cfg.softmax_scale
        self.heads = place.tp.shard(cfg.num_attention_heads, "attention heads")
        self.local_heads = self.heads.stop - self.heads.start
        self._build_queries(cfg, prefix, place)
        self.kv_a_layernorm = RMSNorm(f"{prefix}.kv_a_layernorm", cfg.kv_lora_rank, LATENT_NORM_EPS, place)
        self.kv_b_name = f"{prefix}.kv_b_proj.weight"
        self.kv_b_rows = (cfg.num_attention_heads * (self.nope + self.v_dim), self.kv_lora)
        size = (self.local_heads, self.nope + self.v_dim, self.kv_lora)
        self.kv_b = frozen(torch.empty(size, dtype=place.dtype, device=place.device))
        self.o_proj = row_parallel(
            f"{prefix}.o_proj.weight",
            cfg.hidden_size,
            self._head_rows(self.v_dim),
            cfg.num_attention_heads * self.v_dim,
            place,
        )

    def _build_queries(self, cfg: ModelConfig, prefix: str, place: Placement) -> None:
        """Query projections; kv_a is stacked under q_a, because both read the same input on every rank."""
        total = cfg.num_attention_heads * cfg.qk_head_dim
        rows = self._head_rows(cfg.qk_head_dim)
        down = [(f"{prefix}.kv_a_proj_with_mqa.weight", cfg.latent_dim)]
        self.q_a_layernorm: RMSNorm | None = None
        if self.q_lora is None:
            self.q_proj = column_parallel([f"{prefix}.q_proj.weight"], rows, total, cfg.hidden_size, place)
        else:
            down.insert(0, (f"{prefix}.q_a_proj.weight", self.q_lora))
            self.q_a_layernorm = RMSNorm(f"{prefix}.q_a_layernorm", self.q_lora, LATENT_NORM_EPS, place)
            self.q_proj = column_parallel([f"{prefix}.q_b_proj.weight"], rows, total, self.q_lora, place)
        self.down_proj: Linear = replicated(down, cfg.hidden_size, place)

    def _head_rows(self, width: int) -> slice:
        return slice(self.heads.start * width, self.heads.stop * width)

    @property
    def w_uk(self) -> Tensor:
        """Keys' up-projection.  # [H, nope, kv_lora]"""
        return self.kv_b[:, : self.nope]

    @property
    def w_uv(self) -> Tensor:
        """Values' up-projection.  # [H, v, kv_lora]"""
        return self.kv_b[:, self.nope :]

    def prefill(self, x: Tensor, plan: PrefillPlan, cache_layer: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes latents to the plan's slots."""
        inp = plan.inp
        q_nope, q_pe, latents = self._project(x, plan.rotary)
        write_latents(cache_layer, inp.slots, latents)
        q = torch.cat((q_nope, q_pe), -1)
        cached = (cache_layer, inp.page_table, inp.cu_seqlens, inp.prefix_lens)
        out = prefill_attention(q, *cached, latents, self.w_uk, self.w_uv, self.scale)  # [T, H, v]
        return self.tp.all_reduce(self.o_proj(out.flatten(1)))

    def decode(self, x: Tensor, plan: DecodePlan, cache_layer: Tensor) -> Tensor:
        """x [N, hidden] -> [N, hidden]; writes the nodes' latents to slots or to the draft's tail."""
        inp = plan.inp
        q_nope, q_pe, latents = self._project(x, plan.rotary)
        tail = plan.store(latents, cache_layer)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)  # [N, H, kv_lora]
        q = torch.cat((absorbed, q_pe), -1).view(*plan.shape, self.local_heads, -1)
        cached = (cache_layer, inp.page_table, inp.prefix_lens)
        mixed = tree_attention(q, *cached, tail, inp.mask, self.scale, self.kv_lora, view=plan.view)
        out = torch.bmm(mixed.flatten(0, 1).transpose(0, 1), self.w_uv.transpose(1, 2))  # [H, N, v]
        return self.tp.all_reduce(self.o_proj(out.transpose(0, 1).flatten(1)))

    def _project(self, x: Tensor, rotary: RotaryRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without and with position, and cache entries.  # [N, H, nope], [N, H, rope], [N, C]"""
        down = self.down_proj(x)
        if self.q_a_layernorm is None:
            q_in = x
        else:
            q_in = self.q_a_layernorm(down[:, : self.q_lora])
            down = down[:, self.q_lora :]
        q = self.q_proj(q_in).view(-1, self.local_heads, self.nope + self.rope_dim)  # [N, H, nope + rope]
        # The shared key turns like one more head.
        turning = torch.cat((q[..., self.nope :], down[:, None, self.kv_lora :]), 1)
        turned = rotary.apply(turning)  # [N, H + 1, rope]
        latents = torch.cat((self.kv_a_layernorm(down[:, : self.kv_lora]), turned[:, -1]), -1)
        return q[..., : self.nope], turned[:, :-1], latents

    def specs(self) -> Iterator[TensorSpec]:
        """This layer's attention tensors."""
        yield from self.down_proj.specs()
        if self.q_a_layernorm is not None:
            yield from self.q_a_layernorm.specs()
        yield from self.q_proj.specs()
        yield from self.kv_a_layernorm.specs()
        shard = (self._head_rows(self.nope + self.v_dim), slice(0, self.kv_lora))
        yield TensorSpec(self.kv_b_name, self.kv_b_rows, "linear", partial(self._load_kv_b, shard), shard)
        yield from self.o_proj.specs()

    def _load_kv_b(self, shard: tuple[slice, ...], weight: Tensor, scale: Tensor | None) -> None:
        """Keep kv_b plain and by head: absorption multiplies with its halves, transposed and not."""
        local = self.kv_b.flatten(0, 1)
        check_part(self.kv_b_name, weight, local.shape)
        if scale is not None:
            check_fp8_shard(self.kv_b_name, self.kv_b_rows, shard, self.place.block)
            weight = dequantize(weight, scale, self.place.block, self.place.dtype)
        local.copy_(weight)
