"""The NextN (multi-token prediction) layer that drafts: DeepSeek-V3 report, section 2.2.

At position i it reads the target's state h_i and the token t_{i+1}, and predicts t_{i+2}. Its products take
the embedding first and the state second, as the checkpoints' eh_proj expects; rotary positions are i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nextn.config import ModelConfig
from nextn.kernels import ops
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.models.deepseek import Block, DeepseekModel, States
from nextn.models.inputs import DraftInput, PrefillInput, TreeInput
from nextn.models.mla import plan_decode, plan_prefill
from nextn.models.parallel import Placement, RMSNorm, replicated
from nextn.models.specs import TensorSpec


class NextN(nn.Module):
    """One decoder layer behind eh_proj; shares the target's embedding, head and rotary tables.

    cfg names the checkpoint that holds the layer (the target's own or an exported draft); in the cache the
    layer is always the one after the target's. States come back before and after shared_head.norm.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        target: DeepseekModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep_fp8: bool,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.cache_layer = target.cfg.num_hidden_layers
        self.rotary = target.rotary
        self.embed = target.embed  # a bound method, so the target's weights are not registered twice
        self.place = place = Placement(dtype, device, keep_fp8, cfg.weight_block_size, tp)
        prefix, size, eps = f"model.layers.{cfg.nextn_layer}", cfg.hidden_size, cfg.rms_norm_eps
        self.enorm = RMSNorm(f"{prefix}.enorm", size, eps, place)
        self.hnorm = RMSNorm(f"{prefix}.hnorm", size, eps, place)
        self.eh_proj = replicated([(f"{prefix}.eh_proj.weight", size)], 2 * size, place.unquantized())
        self.block = Block(cfg, prefix, moe=cfg.is_moe(cfg.num_hidden_layers), place=place)
        self.norm = RMSNorm(f"{prefix}.shared_head.norm", size, eps, place)

    def prefill(self, inp: PrefillInput, hidden: Tensor, cache: Tensor) -> States:
        """States of every row, [T, hidden], before and after shared_head.norm; writes latents to inp.slots.

        inp.tokens are t_{i+1}, inp.positions i and hidden [T, hidden] the target's h_i.
        """
        plan = plan_prefill(inp, self.rotary, cache, self.block.self_attn)
        layer = cache[self.cache_layer]
        return States(
            *self.norm.add(*self.block.prefill(None, self._combine(inp.tokens, hidden), plan, layer))
        )

    def decode(self, inp: TreeInput | DraftInput, hidden: Tensor, cache: Tensor) -> States:
        """States of every node, [B, M, hidden], before and after shared_head.norm.

        hidden [B, M, hidden] is the target's state (extension) or the parent's recycled state (drafting).
        """
        plan = plan_decode(inp, self.rotary, cache)
        update = self._combine(inp.tokens.flatten(), plan.clean(hidden))
        x, update = self.block.decode(None, update, plan, cache[self.cache_layer])
        return States(*self.norm.add(x, update, plan.valid)).view(plan.shape)

    def _combine(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """eh_proj of [enorm(embedding), hnorm(hidden)].  # [N], [N, hidden] -> summands [S, N, hidden]"""
        joined = ops.join_norms(
            self.embed(tokens), hidden, self.enorm.weight, self.hnorm.weight, self.enorm.eps
        )
        return self.eh_proj.summands(joined)

    def final_norm(self, g: Tensor) -> Tensor:
        """shared_head.norm over g [..., hidden]; what drafting recycles, and what the target's head reads."""
        return self.norm(g)

    def specs(self) -> Iterator[TensorSpec]:
        """The layer's tensors, without the copies of embedding and head that some checkpoints carry."""
        for part in (self.enorm, self.hnorm, self.eh_proj, self.block, self.norm):
            yield from part.specs()
