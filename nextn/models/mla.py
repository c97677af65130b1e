"""Multi-head latent attention (DeepSeek-V2 report, section 2.1): naive for prefill, absorbed for decode.

The cache holds, for each token, its normalised latent and its rotated shared key. A plan is what one forward
pass shares between its layers: rotary factors, visibility and where latents go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nextn.config import ModelConfig, yarn_mscale
from nextn.kernels import ops
from nextn.kernels.ref.rope import (
    RotaryTables,
    apply_rope,
    plain_frequencies,
    rope_rows,
    rope_table,
    yarn_frequencies,
)
from nextn.models.fp8 import dequantize_blocks
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

if TYPE_CHECKING:
    from nextn.kernels.prefill import PrefillTiles

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
        cos, sin = rope_table(
            frequencies, multiplier, max_positions, dtype=place.dtype, device=place.device
        )  # [max_positions, rope / 2]
        self.tables = RotaryTables(cos, sin, rope.interleave)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A prefill's input and what its layers share."""

    inp: PrefillInput
    rotary: RotaryTables
    factors: tuple[Tensor, Tensor]  # cosines and sines of the T tokens, [T, 1, rope]
    latents: Tensor  # [1, T, C], the layer's entries on their way to the cache
    tiles: PrefillTiles | None  # what kernels share; None where there are none

    def rotate(self, q: Tensor, nope: int) -> Tensor:
        """Queries [T, H, nope + rope] with their last part turned to their positions."""
        turned = apply_rope(q[..., nope:], *self.factors, interleave=self.rotary.interleave)
        return torch.cat((q[..., :nope], turned), -1)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A decode's input and what its layers share: rotary tables, visibility, and where latents go."""

    inp: TreeInput | DraftInput
    rotary: RotaryTables
    positions: Tensor  # [N] int64
    mask: Tensor  # [B, M] int64, the input's
    slots: Tensor | None  # [N] int64, where the valid nodes' latents go; None when not to the cache
    new: Tensor  # [B, M, C], where every node's latent goes: a part of `tail`
    tail: Tensor  # [B, E, C], what is attended beside the prefix
    visible: ops.Visibility
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


def plan_prefill(inp: PrefillInput, rotary: Rotary, cache: Tensor, layer: MLA) -> PrefillPlan:
    """What a prefill's layers share: all are of `layer`'s sizes; `cache` [L, pages, page_size, C]."""
    tables = rotary.tables
    factors = rope_rows(tables.cos, tables.sin, inp.positions, interleave=tables.interleave)
    sizes = {"heads": layer.local_heads, "nope": layer.nope, "v": layer.v_dim}
    tiles = ops.plan_prefill_attention(inp.cu_seqlens, inp.prefix_lens, cache, **sizes)
    latents = cache.new_empty(1, inp.tokens.shape[0], cache.shape[-1])
    return PrefillPlan(inp, tables, factors, latents, tiles)


def plan_decode(inp: TreeInput | DraftInput, rotary: Rotary, cache: Tensor) -> DecodePlan:
    """What a decode's layers share; `cache` [L, pages, page_size, C] gives page size, width and dtype."""
    nodes, slots, valid = inp.tokens.shape[1], None, None
    if isinstance(inp, DraftInput):
        tail = inp.tail[:, : inp.start + nodes]
        new = tail[:, inp.start :]
    else:
        new = tail = cache.new_empty(*inp.tokens.shape, cache.shape[-1])
        slots, valid = inp.slots.contiguous().flatten(), inp.valid.contiguous().flatten()
        if not valid.is_cuda and bool(valid.all()):
            valid = None  # nothing to mask; on a GPU the question would cost a synchronisation
    visible = ops.plan_attention(
        inp.page_table,
        inp.prefix_lens,
        inp.mask,
        page_size=cache.shape[2],
        tail_len=tail.shape[1],
        dtype=cache.dtype,
    )
    positions = inp.positions.contiguous().flatten()
    return DecodePlan(inp, rotary.tables, positions, inp.mask.contiguous(), slots, new, tail, visible, valid)


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
        """x [T, hidden] -> summands [S, T, hidden]; writes latents to the plan's slots."""
        inp, latents = plan.inp, plan.latents
        q_in = self._latents(x, plan.rotary, inp.positions, inp.slots, None, cache_layer, latents)
        q = self.q_proj(x if q_in is None else q_in).view(-1, self.local_heads, self.nope + self.rope_dim)
        cached = (cache_layer, inp.page_table, inp.cu_seqlens, inp.prefix_lens)
        weights = (self.w_uk, self.w_uv, self.scale)
        q = plan.rotate(q, self.nope)
        out = ops.prefill_attention(q, *cached, latents[0], *weights, plan=plan.tiles)  # [T, H, v]
        return self.tp.sum_summands(self.o_proj.summands(out.flatten(1)))

    def decode(self, x: Tensor, plan: DecodePlan, cache_layer: Tensor) -> Tensor:
        """x [N, hidden] -> summands [S, N, hidden]; writes the nodes' latents where the plan says."""
        inp, positions = plan.inp, plan.positions
        q_in = self._latents(x, plan.rotary, positions, plan.slots, plan.valid, cache_layer, plan.new)
        heads = self.q_proj.summands(x if q_in is None else q_in)
        q = ops.absorb_queries(heads, self.w_uk, plan.rotary, positions)  # [N, H, C]
        cached = (cache_layer, inp.page_table, inp.prefix_lens)
        out = ops.decode_attention(
            q, *cached, plan.tail, plan.mask, self.scale, self.w_uv, plan=plan.visible
        )  # [N, H * v]
        return self.tp.sum_summands(self.o_proj.summands(out))

    def _latents(
        self,
        x: Tensor,
        rotary: RotaryTables,
        positions: Tensor,
        slots: Tensor | None,
        valid: Tensor | None,
        cache_layer: Tensor,
        new: Tensor,
    ) -> Tensor | None:
        """Write x's cache entries, to `new` [B, M, C] too; the query projection's input, unless that is x."""
        q_norm = None if self.q_a_layernorm is None else self.q_a_layernorm.weight
        return ops.prepare_latents(
            self.down_proj.summands(x),
            q_norm,
            self.kv_a_layernorm.weight,
            LATENT_NORM_EPS,
            rotary,
            positions,
            slots,
            valid,
            cache_layer,
            new,
        )

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
            weight = dequantize_blocks(weight, scale, self.place.block, self.place.dtype)
        local.copy_(weight)
