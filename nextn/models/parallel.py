"""Layers that know which part of a checkpoint tensor this rank holds: linear, embedding, norm.

Each lists its tensors as `TensorSpec`s and takes them one at a time, already cut to this rank's shard. A
linear may stack several checkpoint tensors by rows, so that one product serves them all; FP8 scales stack
with them where every part but the last fills whole blocks, and otherwise the parts are dequantised at load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextn.errors import CheckpointError, ConfigError
from nextn.kernels import ops
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.gemm import FP8, Block, dequantize, scale_shape
from nextn.models.fp8 import dequantize_blocks
from nextn.models.specs import Kind, TensorSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """How every layer of one model holds its weights: dtype, device, FP8 or not, and its ranks."""

    dtype: torch.dtype
    device: torch.device
    keep_fp8: bool = False
    block: Block = (128, 128)
    tp: TensorParallel = SINGLE

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the router and of logits: float64 for float64, float32 otherwise."""
        return accumulation_dtype(self.dtype)

    def unquantized(self) -> Placement:
        """The same for a layer that checkpoints store in bf16; FP8 that comes all the same is dequantised."""
        return replace(self, keep_fp8=False)


def frozen(data: Tensor) -> nn.Parameter:
    """A parameter for inference."""
    return nn.Parameter(data, requires_grad=False)


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """The shard of a tensor that every rank holds entire."""
    return tuple(slice(0, n) for n in shape)


def shard_shape(shard: Sequence[slice]) -> tuple[int, ...]:
    """Sizes of the part that `shard` cuts out."""
    return tuple(part.stop - part.start for part in shard)


def check_part(name: str, weight: Tensor, shape: Sequence[int]) -> None:
    """Refuse a part of another shape than this rank's; a loader that follows the specs never sends one."""
    if tuple(weight.shape) != tuple(shape):
        raise CheckpointError(f"{name} has a part of shape {tuple(weight.shape)} instead of {tuple(shape)}")


def check_fp8_shard(name: str, shape: Sequence[int], shard: Sequence[slice], block: Block) -> None:
    """Refuse FP8 shards that cut through a block: their scales would belong to another rank's rows too."""
    for dim, (full, part, size) in enumerate(zip(shape[-2:], shard[-2:], block, strict=True)):
        length = part.stop - part.start
        if length != full and length % size:
            raise ConfigError(
                f"{name} in FP8 has {full} {'rows' if dim == 0 else 'columns'}: {length} for each of "
                f"{full // length} ranks, which is not a multiple of its block of {size}; use fewer ranks or "
                "a bf16 checkpoint"
            )


class TensorModule(nn.Module):
    """A module from one tensor to one tensor; nn.Module itself would make every call's result `Any`."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...


class RMSNorm(TensorModule):
    """A norm over the last dimension, held by every rank."""

    def __init__(self, name: str, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = frozen(torch.empty(size, dtype=place.dtype, device=place.device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(
        self, residual: Tensor | None, summands: Tensor | None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [N, size] after adding summands [S, N, size], and its norm.

        Either, but not both, may be None; tokens not `valid` [N] get nothing added.
        """
        if summands is None:
            assert residual is not None
            return residual, self(residual)
        return ops.add_norm(residual, summands, self.weight, self.eps, valid)

    def specs(self) -> Iterator[TensorSpec]:
        """The one weight."""
        yield copy_spec(f"{self.name}.weight", self.weight, "norm")


def copy_spec(
    name: str,
    target: Tensor,
    kind: Kind,
    shape: Sequence[int] | None = None,
    shard: Sequence[slice] | None = None,
) -> TensorSpec:
    """A spec whose tensor is copied into `target` and cast to its dtype; not sharded unless said so."""

    def load(weight: Tensor, scale: Tensor | None) -> None:
        if scale is not None:
            raise CheckpointError(f"{name} is stored in FP8, which is supported for linear layers only")
        check_part(name, weight, target.shape)
        target.copy_(weight)

    full = tuple(shape if shape is not None else target.shape)
    return TensorSpec(name, full, kind, load, tuple(shard) if shard is not None else whole(full))


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor of a stacked linear: its name, full shape and this rank's shard."""

    name: str
    shape: tuple[int, int]
    shard: tuple[slice, ...]

    @property
    def local(self) -> tuple[int, ...]:
        """Rows and columns on this rank."""
        return shard_shape(self.shard)


class Linear(TensorModule):
    """y = x W^T where W stacks this rank's shards of `parts` by rows; no bias. Only kind 'linear' may be FP8.

    weight [rows, in] is FP8 with weight_scale_inv [row blocks, column blocks] float32 when FP8 parts came and
    `place.keep_fp8` holds; otherwise it has place.dtype and weight_scale_inv is None.
    """

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None

    def __init__(self, parts: Sequence[Part], place: Placement, kind: Kind = "linear") -> None:
        super().__init__()
        self.parts, self.place, self.kind = tuple(parts), place, kind
        aligned = all(part.local[0] % place.block[0] == 0 for part in self.parts[:-1])
        self._allocate(fp8=place.keep_fp8 and aligned and kind == "linear")

    def _allocate(self, *, fp8: bool) -> None:
        rows, columns = sum(part.local[0] for part in self.parts), self.parts[0].local[1]
        device, scale = self.place.device, None
        dtype = FP8 if fp8 else self.place.dtype
        self.weight = frozen(torch.empty(rows, columns, dtype=dtype, device=device))
        if fp8:
            size = scale_shape(rows, columns, self.place.block)
            scale = frozen(torch.empty(size, dtype=torch.float32, device=device))
        self.register_parameter("weight_scale_inv", scale)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., rows]."""
        return ops.linear(x, self.weight, self.weight_scale_inv, self.place.block)

    def summands(self, x: Tensor) -> Tensor:
        """x [N, in] -> [S, N, rows], whose sum over S is the product: what a kernel that sums them takes."""
        return ops.linear_summands(x, self.weight, self.weight_scale_inv, self.place.block)

    def specs(self) -> Iterator[TensorSpec]:
        """One spec a part."""
        for number, part in enumerate(self.parts):
            yield TensorSpec(part.name, part.shape, self.kind, partial(self._load, number), part.shard)

    def _load(self, number: int, weight: Tensor, scale: Tensor | None) -> None:
        """Put part `number` in its rows; FP8 stays FP8 where this layer keeps it."""
        part, block = self.parts[number], self.place.block
        check_part(part.name, weight, part.local)
        begin = sum(other.local[0] for other in self.parts[:number])
        rows = slice(begin, begin + part.local[0])
        if scale is not None:
            check_fp8_shard(part.name, part.shape, part.shard, block)
            if self.weight_scale_inv is not None:
                self.weight[rows].copy_(weight)
                self.weight_scale_inv[begin // block[0] :][: scale.shape[0]].copy_(scale)
                return
            weight = dequantize_blocks(weight, scale, block, self.place.dtype)
        elif self.weight_scale_inv is not None:
            self._dequantize_in_place()
        self.weight[rows].copy_(weight)

    def _dequantize_in_place(self) -> None:
        """Give up FP8 for the whole stack, because one of its parts is not FP8."""
        assert self.weight_scale_inv is not None
        plain = dequantize(self.weight, self.weight_scale_inv, self.place.block, self.place.dtype)
        self.weight = frozen(plain)
        self.weight_scale_inv = None


def replicated(names: Sequence[tuple[str, int]], columns: int, place: Placement) -> Linear:
    """Parts (name, rows) that every rank holds entire."""
    return Linear([Part(name, (rows, columns), whole((rows, columns))) for name, rows in names], place)


def column_parallel(names: Sequence[str], rows: slice, total: int, columns: int, place: Placement) -> Linear:
    """Parts of `total` rows each, of which this rank computes `rows`."""
    return Linear([Part(name, (total, columns), (rows, slice(0, columns))) for name in names], place)


def row_parallel(name: str, rows: int, columns: slice, total: int, place: Placement) -> Linear:
    """One tensor of `total` columns of which this rank holds `columns`; the caller sums over the ranks."""
    return Linear([Part(name, (rows, total), (slice(0, rows), columns))], place)


class VocabEmbedding(TensorModule):
    """Token embedding with the vocabulary shared out over the ranks."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.name, self.shape, self.tp = name, (vocab_size, hidden_size), place.tp
        self.rows = place.tp.shard(vocab_size, "vocabulary rows")
        local = self.rows.stop - self.rows.start
        self.weight = frozen(torch.empty(local, hidden_size, dtype=place.dtype, device=place.device))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., hidden]."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        mine = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        rows = F.embedding(torch.where(mine, tokens - self.rows.start, 0), self.weight)
        return self.tp.all_reduce(torch.where(mine.unsqueeze(-1), rows, 0))

    def specs(self) -> Iterator[TensorSpec]:
        """The one weight."""
        shard = (self.rows, slice(0, self.shape[1]))
        yield copy_spec(f"{self.name}.weight", self.weight, "embedding", self.shape, shard)


class VocabHead(TensorModule):
    """Output head with the vocabulary shared out over the ranks; never FP8."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.tp, self.wide = place.tp, place.wide
        shard = (place.tp.shard(vocab_size, "vocabulary rows"), slice(0, hidden_size))
        self.proj = Linear([Part(f"{name}.weight", (vocab_size, hidden_size), shard)], place, "embedding")

    def forward(self, h: Tensor) -> Tensor:
        """h [..., hidden] -> logits [..., vocab], float32 or float64, of the whole vocabulary."""
        local = ops.linear(h, self.proj.weight, None, self.proj.place.block, out_dtype=self.wide)
        return self.tp.all_gather(local, -1)

    def specs(self) -> Iterator[TensorSpec]:
        """The one weight."""
        yield from self.proj.specs()
