"""Writes a checkpoint of any config.json in the official format, with random weights or given ones.

Names and shapes come from the model's own specs, built on the meta device. FP8 weights are normal values
quantised block by block, so that every block has a scale of its own; the router's correction bias is float32
and not zero, and norms differ from one, so that a loader which mixes up tensors changes the model's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import FP8, Block, scale_shape
from nextn.models.checkpoint import shorten
from nextn.models.conversion import Quantized, bytes_of, corrected_config, quantizable
from nextn.models.dummy import tensor_seed, weight_std
from nextn.models.fp8 import quantize_blocks
from nextn.models.output import (
    SHARD_BYTES,
    NewTensor,
    describe_plan,
    output_directory,
    plan_files,
    refuse_output,
    write_directory,
)
from nextn.models.reader import DTYPES
from nextn.models.specs import TensorSpec
from nextn.models.weights import copy_names, meta_models

StoredAs = Literal["fp8", "bf16", "fp32"]

NORM_STD = 0.1
SMALL = 1 << 20
"""Values up to which each one of a random tensor is drawn; larger tensors are put together (`_Pool`)."""

_POOL_COLUMNS = 1 << 16
_GAIN = 0.03
CODES = {dtype: code for code, dtype in DTYPES.items()}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "merges*")


def write_random_checkpoint(
    config: Mapping[str, Any],
    out: Path,
    *,
    stored_as: StoredAs = "fp8",
    seed: int = 0,
    shard_size: int = SHARD_BYTES,
    nextn_copies: bool = True,
    tokenizer: Path | None = None,
    progress: bool = False,
) -> None:
    """Write config.json, shards and index (one file needs no index) as the new or empty directory `out`.

    config: the contents of config.json; written unchanged but for quantization_config and torch_dtype, which
    follow `stored_as`. shard_size: most bytes a shard (a larger tensor gets one of its own). nextn_copies:
    also write the NextN layer's copies of the embedding and the head. tokenizer: directory whose tokenizer
    files are copied. Memory: some 100 MB, whatever the model. An interrupted run is gone on with by the next
    one. Raises `CheckpointError`.
    """
    cfg = ModelConfig.from_dict(config)
    pool = _Pool(seed, cfg.weight_block_size)
    write_made(
        config, out, partial(_random_tensors, pool=pool, seed=seed), stored_as, seed=seed,
        shard_size=shard_size, nextn_copies=nextn_copies, tokenizer=tokenizer, progress=progress,
    )  # fmt: skip


def write_checkpoint(
    config: Mapping[str, Any],
    out: Path,
    weights: Mapping[str, Tensor] | Callable[[str], Tensor],
    *,
    stored_as: StoredAs = "fp8",
    shard_size: int = SHARD_BYTES,
    nextn_copies: bool = True,
    tokenizer: Path | None = None,
    progress: bool = False,
) -> None:
    """The same with given weights: float tensors by the checkpoint's names, or what gives them one at a time.

    A mapping has exactly the model's tensors; the NextN layer's copies are made of the target's. Linear
    layers but eh_proj are quantised for 'fp8'. An output that an interrupted run left is begun anew. A
    function is called from one thread, another one than the caller's.
    """
    if isinstance(weights, Mapping):
        cfg = ModelConfig.from_dict(config)
        names = {spec.name for spec, _ in plan_checkpoint(cfg, stored_as, nextn_copies=False)}
        if weights.keys() != names:
            raise CheckpointError(f"{out}: {_difference(names, weights.keys())}")
        weights = weights.__getitem__
    write_made(
        config, out, partial(_given_tensors, weights=weights), stored_as, seed=None, shard_size=shard_size,
        nextn_copies=nextn_copies, tokenizer=tokenizer, progress=progress, threads=1,
    )  # fmt: skip


def write_made(
    config: Mapping[str, Any],
    out: Path,
    make: Callable[[TensorSpec, Mapping[str, Tensor], Block], list[NewTensor]],
    stored_as: StoredAs,
    *,
    seed: int | str | None,
    shard_size: int,
    nextn_copies: bool = True,
    tokenizer: Path | None = None,
    progress: bool,
    threads: int | None = None,
) -> None:
    """Write the tensors that `make` gives for a spec, its tensors (`plan_checkpoint`) and the block size.

    seed: what else decides their values; without one an interrupted run is begun anew. threads: as in
    `write_files`. All else is as in `write_random_checkpoint`.
    """
    cfg = ModelConfig.from_dict(config)
    if cfg.is_exported_draft:
        raise CheckpointError("config.json describes an exported NextN layer; give that of a whole model")
    refuse_output(out)
    others = find_tokenizer(tokenizer) if tokenizer is not None else []
    specs = plan_checkpoint(cfg, stored_as, nextn_copies=nextn_copies)
    files = plan_files((make(spec, tensors, cfg.weight_block_size) for spec, tensors in specs), shard_size)
    plan = describe_plan(files, {}, seed=seed, config=dict(config), stored_as=stored_as)
    dtype = "float32" if stored_as == "fp32" else "bfloat16"
    write_directory(
        output_directory(out, plan=plan, resume=seed is not None), files,
        corrected_config(config, has_fp8=stored_as == "fp8", dtype=dtype), others, f"writing {out.name}",
        progress=progress, threads=threads,
    )  # fmt: skip


def plan_checkpoint(
    cfg: ModelConfig, stored_as: StoredAs, *, nextn_copies: bool = True
) -> list[tuple[TensorSpec, dict[str, Tensor]]]:
    """All tensors of an official checkpoint of `cfg`, by spec: the weight, and its scale if it is FP8.

    The tensors are on the meta device: names, dtypes and shapes without storage. The NextN layer's copies
    come with the specs of what they repeat.
    """
    target, nextn = meta_models(cfg)
    plan = [(spec, _on_disk(spec, cfg.weight_block_size, stored_as)) for spec in target.specs()]
    if nextn is None:
        return plan
    if nextn_copies:
        copies = {own: copy for copy, own in copy_names(cfg.nextn_layer).items()}
        plan += [
            (spec, {copies[spec.name]: tensors[spec.name]}) for spec, tensors in plan if spec.name in copies
        ]
    return plan + [(spec, _on_disk(spec, cfg.weight_block_size, stored_as)) for spec in nextn.specs()]


def _on_disk(spec: TensorSpec, block_size: Block, stored_as: StoredAs) -> dict[str, Tensor]:
    """How one spec's tensor is stored; in official FP8 files eh_proj is the one linear layer in bf16."""
    if stored_as == "fp8" and quantizable(spec):
        blocks = scale_shape(spec.shape[0], spec.shape[1], block_size)
        return {
            spec.name: torch.empty(spec.shape, dtype=FP8, device="meta"),
            spec.scale_name: torch.empty(blocks, dtype=torch.float32, device="meta"),
        }
    dtype = torch.float32 if stored_as == "fp32" or spec.kind == "bias" else torch.bfloat16
    return {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta")}


class _Values:
    """One tensor's values, made by a function: whole, in float32 or what is given."""

    def __init__(self, make: Callable[[], Tensor], block_size: Block) -> None:
        self._make, self._block_size = make, block_size

    def rows(self) -> Iterator[Tensor]:
        """Float rows from top to bottom."""
        yield self._make()

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same as rows of blocks: FP8 codes and their scales."""
        for rows in self.rows():
            yield quantize_blocks(rows, self._block_size)


def _stored_tensors(spec: TensorSpec, tensors: Mapping[str, Tensor], values: _Values) -> list[NewTensor]:
    """The tensors that one spec has on disk, all of the same values."""
    if spec.scale_name in tensors:
        quantized = Quantized(values.blocks)
        scale = tuple(tensors[spec.scale_name].shape)
        return [
            NewTensor(spec.name, "F8_E4M3", spec.shape, quantized.codes),
            NewTensor(spec.scale_name, "F32", scale, quantized.scales),
        ]

    def pieces(dtype: torch.dtype) -> Iterator[memoryview]:
        for rows in values.rows():
            yield bytes_of(rows.to(dtype))

    return [
        NewTensor(name, CODES[empty.dtype], spec.shape, partial(pieces, empty.dtype))
        for name, empty in tensors.items()
    ]


def _given_tensors(
    spec: TensorSpec, tensors: Mapping[str, Tensor], block_size: Block, *, weights: Callable[[str], Tensor]
) -> list[NewTensor]:
    """Given values for the tensors that one spec has on disk."""

    def make() -> Tensor:
        weight = weights(spec.name).detach().cpu()
        if tuple(weight.shape) != spec.shape or not weight.is_floating_point() or weight.itemsize < 2:
            raise CheckpointError(
                f"{spec.name} is given as {weight.dtype} {list(weight.shape)}; it must be a float tensor "
                f"{list(spec.shape)}"
            )
        if not weight.isfinite().all():
            raise CheckpointError(f"{spec.name} is given with values that are not finite")
        return weight

    return _stored_tensors(spec, tensors, _Values(make, block_size))


def _random_tensors(
    spec: TensorSpec, tensors: Mapping[str, Tensor], block_size: Block, *, pool: _Pool, seed: int
) -> list[NewTensor]:
    """Random values for the tensors that one spec has on disk."""
    if math.prod(spec.shape) > SMALL and pool.can_fill(spec):
        return _stored_tensors(spec, tensors, _Patchwork(spec, pool, seed))

    def make() -> Tensor:
        generator = torch.Generator().manual_seed(tensor_seed(seed, spec.name))
        values = torch.empty(spec.shape).normal_(generator=generator)
        return 1.0 + NORM_STD * values if spec.kind == "norm" else weight_std(spec) * values

    return _stored_tensors(spec, tensors, _Values(make, block_size))


class _Pool:
    """One wide row of blocks of normal values, [bn, columns], and the same quantised."""

    def __init__(self, seed: int, block_size: Block) -> None:
        self.block_size = block_size
        self._seed = seed
        self.columns = max(1, _POOL_COLUMNS // block_size[1]) * block_size[1]

    def can_fill(self, spec: TensorSpec) -> bool:
        """Whether a tensor's rows of blocks can be cut out at many places."""
        return len(spec.shape) == 2 and spec.shape[1] <= self.columns // 2 and spec.kind != "norm"

    @cached_property
    def values(self) -> Tensor:
        """Normal values of unit variance in float32."""
        generator = torch.Generator().manual_seed(tensor_seed(self._seed, "pool"))
        return torch.empty(self.block_size[0], self.columns).normal_(generator=generator)

    @cached_property
    def quantized(self) -> tuple[Tensor, Tensor]:
        """Codes as uint8, and scales [columns / bk]."""
        codes, scale = quantize_blocks(self.values, self.block_size)
        return codes.view(torch.uint8), scale[0]


@dataclass(frozen=True, slots=True)
class _Patch:
    """How one row of blocks is made of the pool: from which column on, times what, with which signs."""

    start: int
    factor: float
    flip_rows: Tensor  # [bn] bool
    flip_columns: Tensor  # [K] bool


class _Patchwork(_Values):
    """A large tensor as rows of blocks out of the pool, at memory speed.

    Each has a random place there, random signs for its rows and its columns, and a gain near 1: no two are
    alike, the values are normal, and quantising them is a change of the pool's codes' signs.
    """

    def __init__(self, spec: TensorSpec, pool: _Pool, seed: int) -> None:
        self._spec, self._pool, self._block_size = spec, pool, pool.block_size
        self._tensor_seed = tensor_seed(seed, spec.name)

    def rows(self) -> Iterator[Tensor]:
        """Float32 rows, a row of blocks at a time."""
        for patch, height in self._patches():
            yield self._floats(patch, height)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same quantised; blocks that the tensor's edge cuts have scales of their own."""
        columns, (full, width) = self._spec.shape[1], self._block_size
        codes, scale = self._pool.quantized
        for patch, height in self._patches():
            if height < full or columns % width:
                yield quantize_blocks(self._floats(patch, height), self._block_size)
                continue
            part = codes[:, patch.start : patch.start + columns] ^ (patch.flip_columns.to(torch.uint8) << 7)
            part ^= patch.flip_rows.to(torch.uint8)[:, None] << 7
            first = patch.start // width
            yield part.view(FP8), patch.factor * scale[None, first : first + columns // width]

    def _patches(self) -> Iterator[tuple[_Patch, int]]:
        """All rows of blocks from top to bottom, and how many rows each has."""
        (rows, columns), (height, width) = self._spec.shape, self._block_size
        generator = torch.Generator().manual_seed(self._tensor_seed)
        places = (self._pool.columns - columns) // width + 1
        count = -(-rows // height)
        starts = torch.randint(places, (count,), generator=generator) * width
        gains = 1 + _GAIN * (2 * torch.rand(count, generator=generator) - 1)
        for block in range(count):
            signs = torch.randint(0, 2, (height + columns,), dtype=torch.uint8, generator=generator).bool()
            factor = weight_std(self._spec) * float(gains[block])
            patch = _Patch(int(starts[block]), factor, signs[:height], signs[height:])
            yield patch, min(height, rows - block * height)

    def _floats(self, patch: _Patch, height: int) -> Tensor:
        columns = slice(patch.start, patch.start + self._spec.shape[1])
        rows = patch.factor * (1.0 - 2.0 * patch.flip_rows[:height, None])
        return (self._pool.values[:height, columns] * rows).mul_(1.0 - 2.0 * patch.flip_columns)


def _difference(names: Set[str], given: Set[str]) -> str:
    """Which of the model's tensors are not given, and which given ones are none of them."""
    parts = [("missing", sorted(names - given)), ("not the model's", sorted(given - names))]
    return "; ".join(f"{kind} ({len(found)}): {shorten(found)}" for kind, found in parts if found)


def find_tokenizer(source: Path) -> list[Path]:
    """The tokenizer's files in a directory (not config.json, not weights); an error when there are none."""
    files = sorted({file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()})
    if not files:
        raise CheckpointError(f"{source} holds no tokenizer files")
    return files
