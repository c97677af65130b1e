"""Exports a checkpoint's NextN layer as a draft checkpoint of its own, in the layout that SGLang reads too.

The layer is renamed to `model.layers.0`; the embedding and the head, which repeat the target's, are left
out. Only shards that hold a part of the layer are opened, and the output appears complete or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nextn.config import EXPORTED_ARCHITECTURE, ModelConfig
from nextn.errors import CheckpointError
from nextn.models.checkpoint import Checkpoint
from nextn.models.conversion import ConvertTo, config_for, convert_item, converted_items, plain_modules
from nextn.models.loader import LoadItem, plan_load
from nextn.models.output import (
    NewFile,
    NewTensor,
    open_source,
    parse_threads,
    run_command,
    write_output,
)
from nextn.models.progress import format_bytes
from nextn.models.weights import copy_names, is_ignored, layer_prefix, meta_models, require_layer

COMMAND = "nextn-export"
WEIGHTS_NAME = "nextn_layer_parameters.safetensors"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: tensors, how many of them FP8, and weights that were converted.

    nbytes: of tensor data. shards: files that they came from. copied_files: files without weights.
    verified: the result was read back and compared.
    """

    tensors: int
    fp8_tensors: int
    converted: int
    nbytes: int
    shards: int
    seconds: float
    copied_files: int
    verified: bool

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({self.fp8_tensors} FP8), {format_bytes(self.nbytes)} from "
            f"{self.shards} shards in {self.seconds:.1f} s, {self.converted} weights converted, "
            f"{self.copied_files} other files"
            + ("" if self.fp8_tensors else ", no quantization_config (nothing is FP8)")
            + (", verified byte for byte" if self.verified else "")
        )


def export_nextn(
    input_dir: Path,
    output_dir: Path,
    *,
    dtype: ConvertTo = "keep",
    force: bool = False,
    verify: bool = False,
    progress: bool = True,
    threads: int | None = None,
) -> ExportReport:
    """Write the NextN layer of the checkpoint `input_dir` as the draft checkpoint `output_dir`.

    dtype: 'keep' copies bytes; 'bf16' dequantises and rounds; 'fp8' quantises what the official format has in
    FP8 and is not FP8 yet. An eh_proj in FP8 becomes bf16 in each, as other engines expect it. force: replace
    an earlier export. verify: read the result back and compare every byte with the source, converted once
    more. threads: as in `convert_checkpoint`. A run that was cut off is gone on with.
    config.json has a quantization_config exactly if a tensor of the layer is FP8, since readers would
    otherwise look for scales that are not there.
    Raises `CheckpointError` when the layer is absent, incomplete or unfit, holds a value that is not finite,
    or changes while it is read, or when the output cannot be written.
    """
    source = open_source(input_dir, output_dir, command=COMMAND, force=force)
    items = find_nextn(source.checkpoint, source.cfg)
    tensors = tuple(tensor for item in items for tensor in _layer_tensors(item, source.cfg, dtype))
    file, converted = NewFile(WEIGHTS_NAME, tensors), converted_items(items, dtype)
    draft = source.config | _draft_fields(source.config, source.cfg.nextn_layer)
    config = config_for(draft, [file], converted, dtype)
    seconds = write_output(
        output_dir, [file], config, source, command=COMMAND, dtype=dtype, index=True, force=force,
        verify=verify, progress=progress, threads=threads,
    )  # fmt: skip
    shards = {stored.file for item in items for stored in item.stored}
    return ExportReport(
        tensors=len(tensors),
        fp8_tensors=sum(tensor.dtype == "F8_E4M3" for tensor in tensors),
        converted=len(converted),
        nbytes=file.nbytes,
        shards=len(shards),
        seconds=seconds,
        copied_files=len(source.others),
        verified=verify,
    )


def find_nextn(checkpoint: Checkpoint, cfg: ModelConfig) -> list[LoadItem]:
    """The layer's tensors and their scales: exactly those that the NextN module reads.

    Raises `CheckpointError` naming what is missing, left over or of an unfit shape or dtype.
    """
    if cfg.is_exported_draft:
        raise CheckpointError(f"{checkpoint.path} is an exported NextN layer already")
    if not cfg.has_nextn:
        raise CheckpointError(
            f"{checkpoint.path} has no NextN layer to export (num_nextn_predict_layers is 0)"
        )
    require_layer(checkpoint.path, cfg.nextn_layer)
    prefix, copies = layer_prefix(cfg.nextn_layer), copy_names(cfg.nextn_layer)
    _, nextn = meta_models(cfg)
    assert nextn is not None
    items, _ = plan_load(
        checkpoint,
        nextn.specs(),
        skip=lambda name: name in copies or is_ignored(name) or not name.startswith(prefix),
        block_size=cfg.weight_block_size,
    )
    return items


def _layer_tensors(item: LoadItem, cfg: ModelConfig, dtype: ConvertTo) -> list[NewTensor]:
    """One weight and its scale as the export has them: under layer 0, in the dtype asked for."""
    name = layer_prefix(0) + item.spec.name.removeprefix(layer_prefix(cfg.nextn_layer))
    return convert_item(name, item, dtype, cfg.weight_block_size)


def _draft_fields(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """The fields in which a draft's config.json differs from that of the checkpoint with its layer `layer`.

    SGLang asks for num_nextn_predict_layers, for which transformers has another name.
    """
    fields: dict[str, Any] = {
        "architectures": [EXPORTED_ARCHITECTURE], "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    quantization = config.get("quantization_config") or {}
    plain = {key: _draft_modules(names, layer) for key, names in plain_modules(quantization).items()}
    return fields | ({"quantization_config": {**quantization, **plain}} if plain else {})


def _draft_modules(names: Iterable[str], layer: int) -> list[str]:
    """A list of modules that are not quantised, by the draft's names, without those of other layers."""
    own, new = layer_prefix(layer), layer_prefix(0)
    return [
        new + name.removeprefix(own) if name.startswith(own) else name
        for name in names
        if name.startswith(own) or not name.startswith("model.layers.")
    ]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options of `nextn-export`."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Write the NextN (MTP) layer of a DeepSeek-V3-family checkpoint as a draft checkpoint. "
        "A run that was cut off is gone on with by the same command.",
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="checkpoint that has the layer")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    parser.add_argument(
        "--dtype",
        choices=get_args(ConvertTo),
        default="keep",
        help="how weights are stored: as they are (default), dequantised, or in FP8 blocks",
    )
    parser.add_argument(
        "--threads", type=parse_threads, help="that convert (default: one a processor, 16 at most)"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare every byte")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nextn-export`; returns the exit status."""
    args = parse_args(argv)

    def work() -> str:
        report = export_nextn(
            args.input_dir,
            args.output_dir,
            dtype=args.dtype,
            force=args.force,
            verify=args.verify,
            threads=args.threads,
        )
        return f"{args.output_dir}: {report}"

    return run_command(COMMAND, work)


if __name__ == "__main__":
    sys.exit(main())
