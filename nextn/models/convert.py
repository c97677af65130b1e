"""Converts a whole checkpoint between block FP8 and bf16: every tensor, the NextN layer and its copies too.

Only what the model's own specs know is written, and nothing of it may be missing, so that a converted
checkpoint loads wherever its source does. The output directory appears complete or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nextn.errors import CheckpointError
from nextn.models.checkpoint import StoredTensor
from nextn.models.conversion import ConvertTo, config_for, convert_item, converted_items, copy_tensor
from nextn.models.loader import LoadItem, plan_load
from nextn.models.output import (
    RECORDS,
    SHARD_BYTES,
    NewTensor,
    Source,
    open_source,
    parse_size,
    parse_threads,
    plan_files,
    run_command,
    write_output,
)
from nextn.models.progress import format_bytes
from nextn.models.specs import TensorSpec
from nextn.models.weights import copy_names, is_ignored, layer_prefix, meta_models

COMMAND = "nextn-convert"
RECORD_NAME = RECORDS[COMMAND]


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
    dtype: ConvertTo,
    *,
    shard_size: int = SHARD_BYTES,
    force: bool = False,
    verify: bool = False,
    progress: bool = True,
    threads: int | None = None,
) -> ConvertReport:
    """Write the checkpoint `input_dir` as `output_dir`, its linear layers in bf16 or FP8.

    shard_size: most bytes of data a file. force: replace an earlier conversion. verify: read the result back
    and compare every byte with a second conversion. threads: that convert (default: one a processor, 16 at
    most). An interrupted run is gone on with by the next one.
    Raises `CheckpointError` when there is nothing to convert, when tensors are missing, unknown or unfit, or
    when the output cannot be written.
    """
    source = open_source(input_dir, output_dir, command=COMMAND, force=force)
    items, ignored = _find_tensors(source)
    converted = converted_items(items, dtype)
    if not converted:
        raise CheckpointError(f"{input_dir} is {dtype} already; there is nothing to convert")
    files = plan_files(_groups(items, ignored, dtype, source), shard_size)
    config = config_for(source.config, files, converted, dtype)
    seconds = write_output(
        output_dir, files, config, source, command=COMMAND, dtype=dtype, force=force, verify=verify,
        progress=progress, threads=threads,
    )  # fmt: skip
    read = [stored for item in items for stored in item.stored] + ignored
    return ConvertReport(
        tensors=sum(len(file.tensors) for file in files),
        converted=len(converted),
        read_bytes=sum(tensor.nbytes for tensor in read),
        written_bytes=sum(file.nbytes for file in files),
        files=len(files),
        copied_files=len(source.others),
        seconds=seconds,
        verified=verify,
    )


def _groups(
    items: Sequence[LoadItem], ignored: Sequence[StoredTensor], dtype: ConvertTo, source: Source
) -> Iterator[list[NewTensor]]:
    """What is written: a weight and its scale are a group."""
    for item in items:
        yield convert_item(item.spec.name, item, dtype, source.cfg.weight_block_size)
    for stored in ignored:
        yield [copy_tensor(stored.name, stored)]


def _find_tensors(source: Source) -> tuple[list[LoadItem], list[StoredTensor]]:
    """Every tensor that the model has, as it lies on disk, and those that no model reads.

    Both in the order of the files. A NextN layer that config.json announces may be absent as a whole.
    """
    checkpoint, cfg = source.checkpoint, source.cfg
    if cfg.is_exported_draft:
        raise CheckpointError(
            f"{checkpoint.path} is an exported NextN layer; export it anew, with `nextn-export --dtype`, or "
            "convert the checkpoint that it comes from"
        )
    target, nextn = meta_models(cfg)
    specs, prefix = list(target.specs()), layer_prefix(cfg.nextn_layer)
    if nextn is not None and any(name.startswith(prefix) for name in checkpoint.names()):
        specs += [*nextn.specs(), *_copies(source)]
    items, _ = plan_load(checkpoint, specs, skip=is_ignored, block_size=cfg.weight_block_size)
    ignored = [checkpoint.find(name) for name in checkpoint.names() if is_ignored(name)]
    found = [stored for stored in ignored if stored is not None]
    return (
        sorted(items, key=lambda item: (item.weight.file, item.weight.begin)),
        sorted(found, key=lambda stored: (stored.file, stored.begin)),
    )


def _copies(source: Source) -> list[TensorSpec]:
    """Specs of the NextN layer's own copies of the embedding and the head, where the checkpoint has them."""
    shape = (source.cfg.vocab_size, source.cfg.hidden_size)
    whole = tuple(slice(0, size) for size in shape)
    names = [name for name in copy_names(source.cfg.nextn_layer) if name in source.checkpoint]
    return [TensorSpec(name, shape, "embedding", lambda weight, scale: None, whole) for name in names]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options of `nextn-convert`."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Convert a DeepSeek-V3-family checkpoint between block FP8 and bf16, all its layers.",
    )
    option = parser.add_argument
    option("--input-dir", type=Path, required=True, help="checkpoint to convert")
    option("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    option("--dtype", choices=["bf16", "fp8"], required=True, help="what linear layers become")
    option("--shard-size", type=parse_size, default=SHARD_BYTES, help="most bytes a file (default 4.3 GB)")
    option("--threads", type=parse_threads, help="that convert (default: one a processor, 16 at most)")
    option("--verify", action="store_true", help="read the result back, compare with a second conversion")
    option("--force", action="store_true", help="replace an earlier conversion")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nextn-convert`; returns the exit status."""
    args = parse_args(argv)

    def work() -> str:
        report = convert_checkpoint(
            args.input_dir, args.output_dir, args.dtype, shard_size=args.shard_size, force=args.force,
            verify=args.verify, threads=args.threads,
        )  # fmt: skip
        return f"{args.output_dir}: {report}"

    return run_command(COMMAND, work)


if __name__ == "__main__":
    sys.exit(main())
