"""Converts a whole checkpoint between block FP8 and bf16: every tensor, the NextN layer and its copies too.

Only what the model's own specs know is written, and nothing of it may be missing, so that a converted
checkpoint loads wherever its source does. The output directory appears complete or not at all.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nextn.config import ModelConfig
from nextn.errors import CheckpointError, NextnError
from nextn.models.checkpoint import Checkpoint, StoredTensor, write_json
from nextn.models.conversion import (
    StoreAs,
    convert_tensor,
    copy_tensor,
    corrected_config,
    is_converted,
    quantizable,
    serial_operations,
)
from nextn.models.loader import LoadItem, plan_load
from nextn.models.output import (
    SHARD_BYTES,
    NewTensor,
    copy_other_files,
    describe_plan,
    other_files,
    output_directory,
    parse_size,
    plan_files,
    refuse_output,
    refuse_overlap,
    require_unchanged,
    verify_files,
    write_description,
    write_files,
)
from nextn.models.progress import Progress, format_bytes
from nextn.models.random_checkpoint import read_config
from nextn.models.specs import TensorSpec
from nextn.models.weights import NEXTN_COPIES, is_ignored, layer_prefix, meta_models

RECORD_NAME = "nextn_conversion.json"
"""Says what a directory was converted from; only a directory that has it is replaced by --force."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written: tensors, how many weights were converted, bytes of data read and written, files.

    copied_files: files without weights. verified: the result was compared with a second conversion.
    """

    tensors: int
    converted: int
    read_bytes: int
    written_bytes: int
    files: int
    copied_files: int
    seconds: float
    verified: bool

    def __str__(self) -> str:
        rate = self.written_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"{self.tensors} tensors ({self.converted} converted) in {self.files} files, "
            f"{format_bytes(self.read_bytes)} -> {format_bytes(self.written_bytes)} in {self.seconds:.1f} s "
            f"({rate:.2f} GB/s), {self.copied_files} other files"
            + (", verified against a second conversion" if self.verified else "")
        )


def convert_checkpoint(
    input_dir: Path,
    output_dir: Path,
    store_as: StoreAs,
    *,
    shard_size: int = SHARD_BYTES,
    force: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Write the checkpoint `input_dir` as `output_dir`, its linear layers in bf16 or FP8.

    shard_size: most bytes of data a file. force: replace an earlier conversion. verify: read the result back
    and compare every byte with a second conversion. An interrupted run is gone on with by the next one.
    Raises `CheckpointError` when there is nothing to convert, when tensors are missing, unknown or unfit, or
    when the output cannot be written.
    """
    refuse_overlap(input_dir, output_dir)
    refuse_output(output_dir, force=force, is_ours=_is_conversion)
    cfg = ModelConfig.from_dir(input_dir)
    items, ignored = _find_tensors(Checkpoint(input_dir), cfg)
    converted = [
        item for item in items if is_converted(item.weight, store_as, quantize=quantizable(item.spec))
    ]
    if not converted:
        raise CheckpointError(f"{input_dir} is {store_as} already; there is nothing to convert")
    read = [tensor for item in items for tensor in (item.weight, item.scale) if tensor is not None] + ignored
    files = plan_files(_new_tensors(items, ignored, store_as, cfg), shard_size)
    config = corrected_config(
        read_config(input_dir),
        has_fp8=any(tensor.dtype == "F8_E4M3" for file in files for tensor in file.tensors),
        store_as=store_as,
        new_scales=store_as == "fp8" and any(quantizable(item.spec) for item in converted),
    )
    sources = [tensor.file for tensor in read] + [input_dir / "config.json", *other_files(input_dir)]
    plan = describe_plan(files, sources, store_as=store_as, block_size=cfg.weight_block_size)
    total = sum(file.nbytes for file in files)
    meter = Progress(f"converting {input_dir.name}", total * (1 + verify), shown=progress)
    output = output_directory(output_dir, plan=plan, force=force, is_ours=_is_conversion)
    with serial_operations(), output as staging:
        write_files(staging, files, meter.advance)
        if verify:
            verify_files(staging, files, meter.advance)
        copied = copy_other_files(input_dir, staging)
        write_description(staging, files, config)
        write_json(staging / RECORD_NAME, {"source": input_dir.resolve().name, "stored_as": store_as})
        require_unchanged(plan)
    meter.close()
    return ConvertReport(
        tensors=sum(len(file.tensors) for file in files),
        converted=len(converted),
        read_bytes=sum(tensor.nbytes for tensor in read),
        written_bytes=total,
        files=len(files),
        copied_files=copied,
        seconds=meter.seconds,
        verified=verify,
    )


def _new_tensors(
    items: Sequence[LoadItem], ignored: Sequence[StoredTensor], store_as: StoreAs, cfg: ModelConfig
) -> Iterator[list[NewTensor]]:
    """What is written, in groups of a weight and its scale."""
    for item in items:
        yield convert_tensor(
            item.spec.name,
            item.weight,
            item.scale,
            store_as,
            quantize=quantizable(item.spec),
            block_size=cfg.weight_block_size,
        )
    for stored in ignored:
        yield [copy_tensor(stored.name, stored)]


def _find_tensors(checkpoint: Checkpoint, cfg: ModelConfig) -> tuple[list[LoadItem], list[StoredTensor]]:
    """Every tensor that the model has, as it lies on disk, and those that no model reads.

    Both in the order of the files. A NextN layer that config.json announces may be absent as a whole.
    """
    if cfg.is_exported_draft:
        raise CheckpointError(
            f"{checkpoint.path} is an exported NextN layer; export it anew, with `nextn-export --dtype`, or "
            "convert the checkpoint that it comes from"
        )
    target, nextn = meta_models(cfg)
    specs, prefix = list(target.specs()), layer_prefix(cfg.nextn_layer)
    if nextn is not None and any(name.startswith(prefix) for name in checkpoint.names()):
        specs += [*nextn.specs(), *_copies(checkpoint, cfg, prefix)]
    items, _ = plan_load(checkpoint, specs, skip=is_ignored, block_size=cfg.weight_block_size)
    ignored = [checkpoint.find(name) for name in checkpoint.names() if is_ignored(name)]
    found = [stored for stored in ignored if stored is not None]
    return (
        sorted(items, key=lambda item: (item.weight.file, item.weight.begin)),
        sorted(found, key=lambda stored: (stored.file, stored.begin)),
    )


def _copies(checkpoint: Checkpoint, cfg: ModelConfig, prefix: str) -> list[TensorSpec]:
    """Specs of the NextN layer's own copies of the embedding and the head, where the checkpoint has them."""
    shape = (cfg.vocab_size, cfg.hidden_size)
    whole = tuple(slice(0, size) for size in shape)
    names = [prefix + copy for copy in NEXTN_COPIES if prefix + copy in checkpoint]
    return [TensorSpec(name, shape, "embedding", lambda weight, scale: None, whole) for name in names]


def _is_conversion(directory: Path) -> bool:
    return (directory / RECORD_NAME).is_file()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options of `nextn-convert`."""
    parser = argparse.ArgumentParser(
        prog="nextn-convert",
        description="Convert a DeepSeek-V3-family checkpoint between block FP8 and bf16, all its layers.",
    )
    option = parser.add_argument
    option("--input-dir", type=Path, required=True, help="checkpoint to convert")
    option("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    option("--dtype", choices=["bf16", "fp8"], required=True, help="what linear layers become")
    option("--shard-size", type=parse_size, default=SHARD_BYTES, help="most bytes a file (default 4.3 GB)")
    option("--verify", action="store_true", help="read the result back, compare with a second conversion")
    option("--force", action="store_true", help="replace an earlier conversion")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nextn-convert`; returns the exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        report = convert_checkpoint(
            args.input_dir,
            args.output_dir,
            args.dtype,
            shard_size=args.shard_size,
            force=args.force,
            verify=args.verify,
        )
    except NextnError as error:
        print(f"nextn-convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nextn-convert: interrupted; the same command goes on with what was written", file=sys.stderr)
        return 130
    print(f"{args.output_dir}: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
