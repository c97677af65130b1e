"""Feed-forward parts of a layer: the dense SwiGLU network, and the mixture of experts with its router."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels import ops
from nextn.kernels.ref.gemm import FP8, dequantize, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts
from nextn.models.fp8 import dequantize_blocks
from nextn.models.parallel import (
    Placement,
    check_fp8_shard,
    check_part,
    column_parallel,
    copy_spec,
    frozen,
    row_parallel,
    whole,
)
from nextn.models.specs import TensorSpec


class DenseMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) over this rank's part of the intermediate dimension; sums are partial."""

    def __init__(self, prefix: str, hidden_size: int, intermediate_size: int, place: Placement) -> None:
        super().__init__()
        part = place.tp.shard(intermediate_size, "intermediate columns")
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        self.gate_up_proj = column_parallel(names, part, intermediate_size, hidden_size, place)
        self.down_proj = row_parallel(
            f"{prefix}.down_proj.weight", hidden_size, part, intermediate_size, place
        )

    def summands(self, x: Tensor) -> Tensor:
        """x [N, hidden] -> [S, N, hidden], whose sum is this rank's share."""
        return self.down_proj.summands(ops.silu_and_mul_summands(self.gate_up_proj.summands(x), x.dtype))

    @property
    def weights(self) -> SharedExperts:
        """What the mixture's op takes beside the routed experts."""
        up, down = self.gate_up_proj, self.down_proj
        return SharedExperts(up.weight, down.weight, up.weight_scale_inv, down.weight_scale_inv)

    def specs(self) -> Iterator[TensorSpec]:
        """gate_proj, up_proj, down_proj."""
        yield from self.gate_up_proj.specs()
        yield from self.down_proj.specs()


class Gate(nn.Module):
    """The router, in float32 (float64 for float64 models) whatever its weight is stored in.

    The weight keeps the model's dtype, which is the checkpoints' own; one that comes wider stays wider.
    """

    weight: nn.Parameter

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def __init__(self, cfg: ModelConfig, prefix: str, place: Placement) -> None:
        super().__init__()
        self.prefix = prefix
        self.top_k, self.n_group, self.topk_group = cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group
        self.scoring, self.method = cfg.scoring_func, cfg.topk_method
        self.norm_topk_prob, self.scaling = cfg.norm_topk_prob, cfg.routed_scaling_factor
        experts, device = cfg.n_routed_experts, place.device
        self.weight = frozen(torch.empty(experts, cfg.hidden_size, dtype=place.dtype, device=device))
        self.e_score_correction_bias: nn.Parameter | None = None
        if cfg.topk_method == "noaux_tc":
            self.e_score_correction_bias = frozen(torch.empty(experts, dtype=place.wide, device=device))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> weights [N, k] float32 or float64, expert numbers [N, k] int64.

        Tokens not `valid` [N] get weights 0 and numbers -1.
        """
        return ops.route_tokens(
            x,
            self.weight,
            self.e_score_correction_bias,
            valid,
            scoring=self.scoring,
            method=self.method,
            top_k=self.top_k,
            n_group=self.n_group,
            topk_group=self.topk_group,
            norm_topk_prob=self.norm_topk_prob,
            scaling=self.scaling,
        )

    def specs(self) -> Iterator[TensorSpec]:
        """The weight and, for noaux_tc, the correction bias."""
        size = (self.weight.shape[0], self.weight.shape[1])
        yield TensorSpec(f"{self.prefix}.weight", size, "gate", self._load, whole(size))
        if self.e_score_correction_bias is not None:
            yield copy_spec(f"{self.prefix}.e_score_correction_bias", self.e_score_correction_bias, "bias")

    def _load(self, weight: Tensor, scale: Tensor | None) -> None:
        name = f"{self.prefix}.weight"
        if scale is not None:
            raise CheckpointError(f"{name} is stored in FP8, which is supported for linear layers only")
        check_part(name, weight, self.weight.shape)
        if weight.dtype.itemsize > self.weight.dtype.itemsize and self.weight.dtype == torch.bfloat16:
            self.weight = frozen(torch.empty_like(self.weight, dtype=torch.float32))
        self.weight.copy_(weight)


class RoutedExperts(nn.Module):
    """All experts' weights, fused; each rank holds its part of every expert's intermediate dimension.

    w13 [E, 2I, H] has gate rows first, w2 [E, H, I]; FP8 with scales where I fills whole blocks.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    scale13: nn.Parameter | None
    scale2: nn.Parameter | None

    def __init__(self, cfg: ModelConfig, prefix: str, place: Placement) -> None:
        super().__init__()
        self.prefix, self.place = prefix, place
        self.count, self.hidden, self.total = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        self.part = place.tp.shard(self.total, "expert intermediate columns")
        self.width = self.part.stop - self.part.start
        fp8 = place.keep_fp8 and self.width % place.block[0] == 0 and self.width % place.block[1] == 0
        self.w13, self.scale13 = self._allocate(2 * self.width, self.hidden, fp8)
        self.w2, self.scale2 = self._allocate(self.hidden, self.width, fp8)

    def _allocate(self, rows: int, columns: int, fp8: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        size, device = (self.count, rows, columns), self.place.device
        weight = frozen(torch.empty(size, dtype=FP8 if fp8 else self.place.dtype, device=device))
        if not fp8:
            return weight, None
        scales = (self.count, *scale_shape(rows, columns, self.place.block))
        return weight, frozen(torch.empty(scales, dtype=torch.float32, device=device))

    @property
    def weights(self) -> ExpertWeights:
        """What the op takes."""
        return ExpertWeights(self.w13, self.w2, self.scale13, self.scale2, self.place.block)

    def specs(self) -> Iterator[TensorSpec]:
        """gate_proj, up_proj and down_proj of each expert."""
        wide, tall = (self.total, self.hidden), (self.hidden, self.total)
        row_shard, column_shard = (self.part, slice(0, self.hidden)), (slice(0, self.hidden), self.part)
        for expert in range(self.count):
            name = f"{self.prefix}.{expert}"
            for half, part in enumerate(("gate_proj", "up_proj")):
                load = partial(self._load13, expert, half)
                yield TensorSpec(f"{name}.{part}.weight", wide, "linear", load, row_shard)
            load = partial(self._load2, expert)
            yield TensorSpec(f"{name}.down_proj.weight", tall, "linear", load, column_shard)

    def _load13(self, expert: int, half: int, weight: Tensor, scale: Tensor | None) -> None:
        name = f"{self.prefix}.{expert}.{('gate_proj', 'up_proj')[half]}.weight"
        check_part(name, weight, (self.width, self.hidden))
        if scale is not None:
            shard = (self.part, slice(0, self.hidden))
            check_fp8_shard(name, (self.total, self.hidden), shard, self.place.block)
        elif self.scale13 is not None:
            self.w13, self.scale13 = self._without_fp8(self.w13, self.scale13), None
        scales = None if self.scale13 is None else self.scale13[expert].chunk(2)[half]
        self._put(self.w13[expert].chunk(2)[half], scales, weight, scale)

    def _load2(self, expert: int, weight: Tensor, scale: Tensor | None) -> None:
        name = f"{self.prefix}.{expert}.down_proj.weight"
        check_part(name, weight, (self.hidden, self.width))
        if scale is not None:
            shard = (slice(0, self.hidden), self.part)
            check_fp8_shard(name, (self.hidden, self.total), shard, self.place.block)
        elif self.scale2 is not None:
            self.w2, self.scale2 = self._without_fp8(self.w2, self.scale2), None
        self._put(self.w2[expert], None if self.scale2 is None else self.scale2[expert], weight, scale)

    def _put(self, target: Tensor, target_scale: Tensor | None, weight: Tensor, scale: Tensor | None) -> None:
        """Copy one tensor to its place, dequantised unless this layer keeps FP8."""
        if scale is not None and target_scale is None:
            weight = dequantize_blocks(weight, scale, self.place.block, self.place.dtype)
        elif scale is not None and target_scale is not None:
            target_scale.copy_(scale)
        target.copy_(weight)

    def _without_fp8(self, weight: Tensor, scale: Tensor) -> nn.Parameter:
        """Give up FP8 for every expert, because one of them is not FP8."""
        return frozen(dequantize(weight, scale, self.place.block, self.place.dtype))


class MoE(nn.Module):
    """Routed experts and the shared one (DeepSeek-V3 report, section 2.1.2)."""

    def __init__(self, cfg: ModelConfig, prefix: str, place: Placement) -> None:
        super().__init__()
        self.tp = place.tp
        self.gate = Gate(cfg, f"{prefix}.gate", place)
        self.experts = RoutedExperts(cfg, f"{prefix}.experts", place)
        self.shared_experts: DenseMLP | None = None
        if cfg.n_shared_experts:
            width = cfg.n_shared_experts * cfg.moe_intermediate_size
            self.shared_experts = DenseMLP(f"{prefix}.shared_experts", cfg.hidden_size, width, place)

    def forward(self, x: Tensor, valid: Tensor | None, *, host: bool) -> Tensor:
        """x [N, hidden] -> summands [S, N, hidden]; tokens not `valid` [N] run no routed expert.

        `host` allows the host to read the router's choice, which suits long inputs on plain torch.
        """
        weights, indices = self.gate(x, valid)
        shared = None if self.shared_experts is None else self.shared_experts.weights
        out = ops.run_experts(x, weights, indices, self.experts.weights, shared, valid, host=host)
        return self.tp.sum_summands(out)

    def specs(self) -> Iterator[TensorSpec]:
        """Router, experts, shared expert."""
        yield from self.gate.specs()
        yield from self.experts.specs()
        if self.shared_experts is not None:
            yield from self.shared_experts.specs()
