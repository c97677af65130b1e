"""Exports a checkpoint's NextN layer as a draft checkpoint of its own, in the layout that SGLang reads too.

The layer is renamed to `model.layers.0`; the embedding and the head, which repeat the target's, are left
out. Only shards that hold a part of the layer are opened, and the output appears complete or not at all.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nextn.config import EXPORTED_ARCHITECTURE, ModelConfig
from nextn.errors import CheckpointError, NextnError
from nextn.models.checkpoint import Checkpoint
from nextn.models.conversion import StoreAs, convert_tensor, corrected_config, is_converted, quantizable
from nextn.models.loader import LoadItem, plan_load
from nextn.models.output import (
    NewFile,
    NewTensor,
    copy_other_files,
    describe_plan,
    other_files,
    output_directory,
    refuse_output,
    refuse_overlap,
    require_unchanged,
    verify_files,
    write_description,
    write_files,
)
from nextn.models.progress import Progress, format_bytes
from nextn.models.random_checkpoint import read_config
from nextn.models.weights import NEXTN_COPIES, is_ignored, layer_prefix, meta_models, require_layer

WEIGHTS_NAME = "nextn_layer_parameters.safetensors"

_PLAIN_LISTS = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: tensors, how many of them FP8, and weights that were converted.

    nbytes: of tensor data. shards: files that they came from. copied_files: files without weights.
    kept_quantization: config.json has a quantization_config. verified: the result was read back and compared.
    """

    tensors: int
    fp8_tensors: int
    converted: int
    nbytes: int
    shards: int
    seconds: float
    copied_files: int
    kept_quantization: bool
    verified: bool

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({self.fp8_tensors} FP8), {format_bytes(self.nbytes)} from "
            f"{self.shards} shards in {self.seconds:.1f} s, {self.converted} weights converted, "
            f"{self.copied_files} other files"
            + ("" if self.kept_quantization else ", no quantization_config (nothing is FP8)")
            + (", verified byte for byte" if self.verified else "")
        )


def export_nextn(
    input_dir: Path,
    output_dir: Path,
    *,
    dtype: StoreAs = "keep",
    force: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> ExportReport:
    """Write the NextN layer of the checkpoint `input_dir` as the draft checkpoint `output_dir`.

    dtype: 'keep' copies bytes; 'bf16' dequantises and rounds; 'fp8' quantises what the official format has in
    FP8 and is not FP8 yet. force: replace an earlier export. verify: read the result back and compare every
    byte with the source, converted once more. A run that was cut off is gone on with.
    config.json has a quantization_config exactly if a tensor of the layer is FP8, since readers would
    otherwise look for scales that are not there.
    Raises `CheckpointError` when the layer is absent, incomplete or unfit, holds a value that is not finite,
    or changes while it is read, or when the output cannot be written.
    """
    cfg = ModelConfig.from_dir(input_dir)
    _refuse(input_dir, output_dir, cfg, force)
    items = find_nextn(Checkpoint(input_dir), cfg)
    tensors = [tensor for item in items for tensor in _new_tensors(item, cfg, dtype)]
    fp8 = sum(tensor.dtype == "F8_E4M3" for tensor in tensors)
    converted = [
        item.spec for item in items if is_converted(item.weight, dtype, quantize=quantizable(item.spec))
    ]
    config = corrected_config(
        read_config(input_dir),
        has_fp8=fp8 > 0,
        store_as=dtype,
        new_scales=dtype == "fp8" and any(map(quantizable, converted)),
    )
    config |= _draft_fields(config, cfg.nextn_layer)
    file = NewFile(WEIGHTS_NAME, tuple(tensors))
    shards = {stored.file for item in items for stored in (item.weight, item.scale) if stored is not None}
    sources = [*shards, input_dir / "config.json", *other_files(input_dir)]
    plan = describe_plan([file], sources, dtype=dtype)
    meter = Progress(f"exporting {input_dir.name}", file.nbytes, shown=progress)
    with output_directory(output_dir, plan=plan, force=force, is_ours=_is_export) as staging:
        write_files(staging, [file], meter.advance)
        meter.close()
        copied = copy_other_files(input_dir, staging)
        write_description(staging, [file], config, index=True)
        if verify:
            check = Progress(f"verifying {output_dir.name}", file.nbytes, shown=progress)
            verify_files(staging, [file], check.advance)
            check.close()
        require_unchanged(plan)
    return ExportReport(
        tensors=len(tensors),
        fp8_tensors=fp8,
        converted=len(converted),
        nbytes=file.nbytes,
        shards=len(shards),
        seconds=meter.seconds,
        copied_files=copied,
        kept_quantization="quantization_config" in config,
        verified=verify,
    )


def find_nextn(checkpoint: Checkpoint, cfg: ModelConfig) -> list[LoadItem]:
    """The layer's tensors and their scales: exactly those that the NextN module reads.

    Raises `CheckpointError` naming what is missing, left over or of an unfit shape or dtype.
    """
    require_layer(checkpoint.path, cfg.nextn_layer)
    prefix = layer_prefix(cfg.nextn_layer)
    copies = {prefix + name for name in NEXTN_COPIES}
    _, nextn = meta_models(cfg)
    assert nextn is not None
    items, _ = plan_load(
        checkpoint,
        nextn.specs(),
        skip=lambda name: name in copies or is_ignored(name) or not name.startswith(prefix),
        block_size=cfg.weight_block_size,
    )
    return items


def _refuse(input_dir: Path, output_dir: Path, cfg: ModelConfig, force: bool) -> None:
    if cfg.is_exported_draft:
        raise CheckpointError(f"{input_dir} is an exported NextN layer already")
    if not cfg.has_nextn:
        raise CheckpointError(f"{input_dir} has no NextN layer to export (num_nextn_predict_layers is 0)")
    refuse_overlap(input_dir, output_dir)
    refuse_output(output_dir, force=force, is_ours=_is_export)


def _is_export(directory: Path) -> bool:
    return (directory / WEIGHTS_NAME).is_file()


def _new_tensors(item: LoadItem, cfg: ModelConfig, dtype: StoreAs) -> list[NewTensor]:
    """One weight and its scale as the export has them: under layer 0, in the dtype asked for."""
    return convert_tensor(
        layer_prefix(0) + item.spec.name.removeprefix(layer_prefix(cfg.nextn_layer)),
        item.weight,
        item.scale,
        dtype,
        quantize=quantizable(item.spec),
        block_size=cfg.weight_block_size,
    )


def _draft_fields(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """The fields in which a draft's config.json differs from that of the checkpoint with its layer `layer`.

    SGLang asks for num_nextn_predict_layers, for which transformers has another name.
    """
    fields: dict[str, Any] = {
        "architectures": [EXPORTED_ARCHITECTURE], "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    quantization = config.get("quantization_config") or {}
    plain = {key: _draft_modules(quantization[key], layer) for key in _PLAIN_LISTS if quantization.get(key)}
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
        prog="nextn-export",
        description="Write the NextN (MTP) layer of a DeepSeek-V3-family checkpoint as a draft checkpoint. "
        "A run that was cut off is gone on with by the same command.",
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="checkpoint that has the layer")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    parser.add_argument(
        "--dtype",
        choices=get_args(StoreAs),
        default="keep",
        help="how weights are stored: as they are (default), dequantised, or in FP8 blocks",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare every byte")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nextn-export`; returns the exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        report = export_nextn(
            args.input_dir, args.output_dir, dtype=args.dtype, force=args.force, verify=args.verify
        )
    except NextnError as error:
        print(f"nextn-export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nextn-export: interrupted; the same command goes on with what was written", file=sys.stderr)
        return 130
    print(f"{args.output_dir}: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
