"""The target: DeepSeek-V2/V3's decoder, from token ids to hidden states before the final norm, and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nextn.config import ModelConfig
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.models.inputs import PrefillInput, TreeInput
from nextn.models.mla import MLA, DecodePlan, PrefillPlan, Rotary, plan_decode, plan_prefill
from nextn.models.moe import DenseMLP, MoE
from nextn.models.parallel import Placement, RMSNorm, VocabEmbedding, VocabHead
from nextn.models.specs import TensorSpec


class States(NamedTuple):
    """What a forward pass leaves at each token: the residual stream, and its norm, which the head reads."""

    hidden: Tensor  # [..., hidden], before the last norm
    normed: Tensor  # [..., hidden], after it

    def view(self, shape: tuple[int, int]) -> States:
        """The same as [B, M, hidden]."""
        return States(self.hidden.view(*shape, -1), self.normed.view(*shape, -1))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    mlp: DenseMLP | MoE

    def __init__(self, cfg: ModelConfig, prefix: str, *, moe: bool, place: Placement) -> None:
        super().__init__()
        size, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.tp = place.tp
        self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", size, eps, place)
        self.self_attn = MLA(cfg, f"{prefix}.self_attn", place)
        self.post_attention_layernorm = RMSNorm(f"{prefix}.post_attention_layernorm", size, eps, place)
        if moe:
            self.mlp = MoE(cfg, f"{prefix}.mlp", place)
        else:
            self.mlp = DenseMLP(f"{prefix}.mlp", size, cfg.intermediate_size, place)

    def prefill(
        self, x: Tensor | None, update: Tensor | None, plan: PrefillPlan, cache_layer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One layer over T tokens: the residual stream x [T, hidden] and what is still to be added to it.

        Takes and returns update [S, T, hidden], summands that the next norm adds to x on its way. x None
        stands for zeros: the NextN layer starts from a product alone. update None: there is none yet.
        """
        x, normed = self.input_layernorm.add(x, update)
        update = self.self_attn.prefill(normed, plan, cache_layer)
        return self._feed_forward(x, update, None, host=True)

    def decode(
        self, x: Tensor | None, update: Tensor | None, plan: DecodePlan, cache_layer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same over the N nodes of a decode; what invalid nodes would add is left out."""
        x, normed = self.input_layernorm.add(x, update, plan.valid)
        update = self.self_attn.decode(normed, plan, cache_layer)
        return self._feed_forward(x, update, plan.valid, host=False)

    def _feed_forward(
        self, x: Tensor, update: Tensor, valid: Tensor | None, *, host: bool
    ) -> tuple[Tensor, Tensor]:
        x, normed = self.post_attention_layernorm.add(x, update, valid)
        if isinstance(self.mlp, MoE):
            return x, self.mlp.forward(normed, valid, host=host)
        return x, self.tp.sum_summands(self.mlp.summands(normed))

    def specs(self) -> Iterator[TensorSpec]:
        """This layer's tensors."""
        for part in (self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp):
            yield from part.specs()


class DeepseekModel(nn.Module):
    """Embedding, decoder layers, final norm and head of the target model.

    cache: [layers, pages, page_size, kv_lora + rope] in the compute dtype; layer i of the model uses layer i
    of the cache. States are returned before and after the final norm, because the draft may want either.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep_fp8: bool,
        max_positions: int,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.place = place = Placement(dtype, device, keep_fp8, cfg.weight_block_size, tp)
        self.rotary = Rotary(cfg, max_positions, place)
        self.embed_tokens = VocabEmbedding("model.embed_tokens", cfg.vocab_size, cfg.hidden_size, place)
        self.layers = nn.ModuleList(
            Block(cfg, f"model.layers.{layer}", moe=cfg.is_moe(layer), place=place)
            for layer in range(cfg.num_hidden_layers)
        )
        self.norm = RMSNorm("model.norm", cfg.hidden_size, cfg.rms_norm_eps, place)
        self.lm_head = VocabHead("lm_head", cfg.vocab_size, cfg.hidden_size, place)

    def prefill(self, inp: PrefillInput, cache: Tensor) -> States:
        """States of every token, [T, hidden]; writes latents to inp.slots."""
        plan = plan_prefill(inp, self.rotary, cache, next(self.blocks()).self_attn)
        x, update = self.embed(inp.tokens), None
        for layer, block in enumerate(self.blocks()):
            x, update = block.prefill(x, update, plan, cache[layer])
        return States(*self.norm.add(x, update))

    def decode(self, inp: TreeInput, cache: Tensor) -> States:
        """States of every node, [B, M, hidden]; writes the valid nodes' latents to inp.slots."""
        plan = plan_decode(inp, self.rotary, cache)
        x, update = self.embed(inp.tokens).flatten(0, 1), None
        for layer, block in enumerate(self.blocks()):
            x, update = block.decode(x, update, plan, cache[layer])
        return States(*self.norm.add(x, update, plan.valid)).view(plan.shape)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., hidden]."""
        return self.embed_tokens(tokens)

    def final_norm(self, h: Tensor) -> Tensor:
        """model.norm over h [..., hidden]."""
        return self.norm(h)

    def logits(self, h_normed: Tensor) -> Tensor:
        """h_normed [..., hidden] -> [..., vocab] in float32 (float64 for float64), of all ranks."""
        return self.lm_head(h_normed)

    def blocks(self) -> Iterator[Block]:
        """The decoder layers in order."""
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor of the target model, in the checkpoint's order of layers."""
        yield from self.embed_tokens.specs()
        for block in self.blocks():
            yield from block.specs()
        yield from self.norm.specs()
        yield from self.lm_head.specs()
