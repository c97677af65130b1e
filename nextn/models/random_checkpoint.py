"""Writes a checkpoint of any config.json with random weights, in the official format.

Names and shapes come from the model's own specs, built on the meta device. FP8 weights are normal values
quantised block by block, so that every block has a scale of its own; the router's correction bias is float32
and not zero, and norms differ from one, so that a loader which mixes up tensors changes the model's output.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import Block, scale_shape
from nextn.models.checkpoint import write_index, write_json
from nextn.models.dummy import tensor_seed, weight_std
from nextn.models.progress import Progress
from nextn.models.specs import TensorSpec
from nextn.models.weights import NEXTN_COPIES, layer_prefix, meta_models

StoredAs = Literal["fp8", "bf16", "fp32"]

FP8_MAX = 448.0
NORM_STD = 0.1
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "merges*")


def write_random_checkpoint(
    config: Mapping[str, Any],
    out: Path,
    *,
    stored_as: StoredAs = "fp8",
    seed: int = 0,
    shard_size: int = 1 << 30,
    nextn_copies: bool = True,
    tokenizer: Path | None = None,
    progress: bool = False,
) -> None:
    """Write config.json, shards and index (one file needs no index) into the new or empty directory `out`.

    config: the contents of config.json; written unchanged but for quantization_config, which follows
    `stored_as`. shard_size: most bytes a shard (a larger tensor gets one of its own); as much is held in
    memory. nextn_copies: also write the NextN layer's copies of the embedding and the head.
    tokenizer: directory whose tokenizer files are copied. Raises `CheckpointError`.
    """
    cfg = ModelConfig.from_dict(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not an empty directory; remove it or choose another")
    files = find_tokenizer(tokenizer) if tokenizer is not None else []
    out.mkdir(parents=True, exist_ok=True)
    plan = plan_checkpoint(cfg, stored_as, nextn_copies=nextn_copies)
    total = sum(empty.nbytes for _, tensors in plan for empty in tensors.values())
    meter = Progress(f"writing {out.name}", total, shown=progress)
    groups = (_draw(spec, tensors, cfg.weight_block_size, seed) for spec, tensors in plan)
    write_shards(out, groups, shard_size, meter)
    meter.close()
    write_json(out / "config.json", _config_for(config, stored_as))
    for file in files:
        shutil.copyfile(file, out / file.name)


def plan_checkpoint(
    cfg: ModelConfig, stored_as: StoredAs, *, nextn_copies: bool = True
) -> list[tuple[TensorSpec, dict[str, Tensor]]]:
    """All tensors of an official checkpoint of `cfg`, by spec: the weight, its scale if it is FP8, its copy.

    The tensors are on the meta device: names, dtypes and shapes without storage.
    """
    target, nextn = meta_models(cfg)
    specs = [*target.specs(), *(nextn.specs() if nextn else ())]
    plan = [(spec, _on_disk(spec, cfg.weight_block_size, stored_as)) for spec in specs]
    if nextn is not None and nextn_copies:
        prefix = layer_prefix(cfg.nextn_layer)
        originals = ("model.embed_tokens.weight", "lm_head.weight")
        copies = {name: prefix + copy for name, copy in zip(originals, NEXTN_COPIES, strict=True)}
        for spec, tensors in plan:
            if spec.name in copies:
                tensors[copies[spec.name]] = tensors[spec.name]
    return plan


def write_shards(
    out: Path, groups: Iterable[dict[str, Tensor]], shard_size: int, meter: Progress | None = None
) -> None:
    """Write groups of tensors (a group stays in one file) as shards of at most `shard_size` bytes.

    Files are named as on the hub: model-00001-of-00004.safetensors and an index, or model.safetensors alone.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, out / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group.values())
        if pending and size + nbytes > shard_size:
            flush()
            size = 0
        pending.update(group)
        size += nbytes
        total += nbytes
        if meter is not None:
            meter.advance(nbytes)
    flush()
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
        path = (out / f"part-{number}.safetensors").rename(out / f"{file}.safetensors")
        path.chmod(0o644)  # the library makes files that only their owner can read
        files |= dict.fromkeys(names, path.name)
    if len(shards) > 1:
        write_index(out, files, total)


def quantize_blocks(weight: Tensor, block_size: Block) -> tuple[Tensor, Tensor]:
    """Quantise `weight` [N, K] to e4m3 with one scale a block: amax / 448 (1 for a block of zeros).

    Returns FP8 [N, K] and float32 scales [ceil(N / bn), ceil(K / bk)]; short blocks are padded with zeros,
    which do not change amax (the checkpoint format's own rule).
    """
    rows, columns = weight.shape
    (bn, bk), (n, k) = block_size, scale_shape(rows, columns, block_size)
    padded = torch.zeros(n * bn, k * bk, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight
    tiles = padded.view(n, bn, k, bk)
    amax = tiles.abs().amax(dim=(1, 3))  # [n, k]
    scale = torch.where(amax > 0, amax / FP8_MAX, 1.0)
    codes = (tiles / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(n * bn, k * bk)[:rows, :columns].contiguous(), scale


def find_tokenizer(source: Path) -> list[Path]:
    """The tokenizer's files in a directory (not config.json, not weights); an error when there are none."""
    files = sorted({file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()})
    if not files:
        raise CheckpointError(f"{source} holds no tokenizer files")
    return files


def _on_disk(spec: TensorSpec, block_size: Block, stored_as: StoredAs) -> dict[str, Tensor]:
    """How one spec's tensor is stored; in official FP8 files eh_proj is the one linear layer in bf16."""
    if stored_as == "fp8" and spec.kind == "linear" and not spec.name.endswith(".eh_proj.weight"):
        blocks = scale_shape(spec.shape[0], spec.shape[1], block_size)
        return {
            spec.name: torch.empty(spec.shape, dtype=torch.float8_e4m3fn, device="meta"),
            spec.scale_name: torch.empty(blocks, dtype=torch.float32, device="meta"),
        }
    dtype = torch.float32 if stored_as == "fp32" or spec.kind == "bias" else torch.bfloat16
    return {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta")}


def _draw(spec: TensorSpec, tensors: Mapping[str, Tensor], block_size: Block, seed: int) -> dict[str, Tensor]:
    """Random values for the tensors that one spec has on disk, all from the same numbers."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, spec.name))
    values = torch.empty(spec.shape).normal_(generator=generator)
    values = 1.0 + NORM_STD * values if spec.kind == "norm" else weight_std(spec) * values
    if spec.scale_name in tensors:
        weight, scale = quantize_blocks(values, block_size)
        return {spec.name: weight, spec.scale_name: scale}
    return {name: values.to(empty.dtype, copy=True) for name, empty in tensors.items()}


def _config_for(config: Mapping[str, Any], stored_as: StoredAs) -> dict[str, Any]:
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if stored_as == "fp8":
        quantization = dict(config.get("quantization_config") or {})
        quantization.setdefault("activation_scheme", "dynamic")
        quantization.setdefault("fmt", "e4m3")
        quantization.setdefault("quant_method", "fp8")
        quantization.setdefault("weight_block_size", [128, 128])
        result["quantization_config"] = quantization
    result["torch_dtype"] = "float32" if stored_as == "fp32" else "bfloat16"
    return result


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, which may be a config.json or a directory that holds one."""
    path = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config
