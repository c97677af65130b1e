"""Exports a checkpoint's NextN layer as a draft checkpoint of its own, in the layout that SGLang reads too.

The layer is renamed to `model.layers.0`; the embedding and the head, which repeat the target's, are left
out. Bytes are copied, not converted, and the output directory appears complete or not at all.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from nextn.config import EXPORTED_ARCHITECTURE, ModelConfig
from nextn.errors import CheckpointError, NextnError
from nextn.models.checkpoint import Checkpoint, StoredTensor, copy_tensors, write_index, write_json
from nextn.models.loader import plan_load
from nextn.models.progress import Progress, format_bytes
from nextn.models.random_checkpoint import read_config
from nextn.models.weights import NEXTN_COPIES, is_ignored, layer_prefix, meta_models, require_layer

WEIGHTS_NAME = "nextn_layer_parameters.safetensors"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: tensors, how many of them FP8, bytes of tensor data, seconds, other files copied.

    kept_quantization: config.json still has a quantization_config. verified: the result was compared.
    """

    tensors: int
    fp8_tensors: int
    nbytes: int
    seconds: float
    copied_files: int
    kept_quantization: bool
    verified: bool

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({self.fp8_tensors} FP8), {format_bytes(self.nbytes)} in "
            f"{self.seconds:.1f} s, {self.copied_files} other files"
            + ("" if self.kept_quantization else ", no quantization_config (nothing is FP8)")
            + (", verified byte for byte" if self.verified else "")
        )


def export_nextn(
    input_dir: Path, output_dir: Path, *, force: bool = False, verify: bool = False, progress: bool = True
) -> ExportReport:
    """Write the NextN layer of the checkpoint `input_dir` as the draft checkpoint `output_dir`.

    Only shards that hold a part of the layer are opened. force: replace an earlier export. verify: read the
    result back and compare every byte with the source. config.json loses its quantization_config when no
    tensor of the layer is FP8, since readers would otherwise look for scales.
    Raises `CheckpointError` when the layer is absent, incomplete or unfit, or the output cannot be written.
    """
    cfg = ModelConfig.from_dir(input_dir)
    _refuse(input_dir, output_dir, cfg, force)
    tensors = find_nextn(Checkpoint(input_dir), cfg)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    fp8 = sum(tensor.dtype == "F8_E4M3" for tensor in tensors.values())
    config = read_config(input_dir) | {"architectures": [EXPORTED_ARCHITECTURE], "num_hidden_layers": 1}
    if not fp8:
        config.pop("quantization_config", None)
    meter = Progress(f"exporting {input_dir.name}", nbytes, shown=progress)
    try:
        with _directory_in_place_of(output_dir) as temporary:
            copied = _copy_other_files(input_dir, temporary)
            copy_tensors(temporary / WEIGHTS_NAME, tensors, meter.advance)
            write_json(temporary / "config.json", config)
            write_index(temporary, dict.fromkeys(sorted(tensors), WEIGHTS_NAME), nbytes)
            if verify:
                _verify(temporary, tensors)
    except OSError as error:
        raise CheckpointError(f"{output_dir} cannot be written: {error}") from None
    meter.close()
    return ExportReport(
        len(tensors), fp8, nbytes, meter.seconds, copied, "quantization_config" in config, verify
    )


def find_nextn(checkpoint: Checkpoint, cfg: ModelConfig) -> dict[str, StoredTensor]:
    """The layer's tensors by their exported names: exactly those that the NextN module reads, and scales.

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
    stored = [tensor for item in items for tensor in (item.weight, item.scale) if tensor is not None]
    return {layer_prefix(0) + tensor.name.removeprefix(prefix): tensor for tensor in stored}


def _refuse(input_dir: Path, output_dir: Path, cfg: ModelConfig, force: bool) -> None:
    if cfg.is_exported_draft:
        raise CheckpointError(f"{input_dir} is an exported NextN layer already")
    if not cfg.has_nextn:
        raise CheckpointError(f"{input_dir} has no NextN layer to export (num_nextn_predict_layers is 0)")
    source, target = input_dir.resolve(), output_dir.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(f"{output_dir} must lie outside {input_dir}, and not around it")
    if not output_dir.exists():
        return
    if not output_dir.is_dir():
        raise CheckpointError(f"{output_dir} exists and is not a directory")
    if any(output_dir.iterdir()):
        if not force:
            raise CheckpointError(f"{output_dir} is not empty; --force replaces an earlier export")
        if not (output_dir / WEIGHTS_NAME).is_file():
            raise CheckpointError(f"{output_dir} is not an earlier export, so --force does not replace it")


@contextmanager
def _directory_in_place_of(output_dir: Path) -> Iterator[Path]:
    """A temporary sibling that takes `output_dir`'s place when the block ends well, else vanishes."""
    temporary = output_dir.with_name(f".{output_dir.name}.{os.getpid()}.new")
    old = output_dir.with_name(f".{output_dir.name}.{os.getpid()}.old")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if output_dir.exists():
            output_dir.rename(old)
        temporary.rename(output_dir)
        _sync(output_dir.parent)
    finally:
        if old.exists() and not output_dir.exists():
            old.rename(output_dir)
        for leftover in (temporary, old):
            if leftover.exists():
                shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    """Flush a file or a directory's table of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_other_files(input_dir: Path, output_dir: Path) -> int:
    """Copy tokenizer, remote code, generation config and the like: all files that hold no weights."""
    copied = 0
    for file in sorted(input_dir.iterdir()):
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, output_dir / file.name)
            copied += 1
    return copied


def _verify(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    """Read the written file back and compare it with its source, tensor by tensor, byte by byte."""
    written = Checkpoint(directory)
    if written.names() != tensors.keys():
        raise CheckpointError(f"{directory}: the index that was written does not name the exported tensors")
    for name, source in tensors.items():
        copy = written.find(name)
        if copy is None or (copy.dtype, copy.shape) != (source.dtype, source.shape):
            raise CheckpointError(f"{directory}: {name} was not written as it is in {source.file}")
        if any(a != b for a, b in zip_longest(copy.chunks(), source.chunks())):
            raise CheckpointError(f"{directory}: {name} differs from {source.name} in {source.file}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options of `nextn-export`."""
    parser = argparse.ArgumentParser(
        prog="nextn-export",
        description="Write the NextN (MTP) layer of a DeepSeek-V3-family checkpoint as a draft checkpoint.",
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="checkpoint that has the layer")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare every byte")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nextn-export`; returns the exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        report = export_nextn(args.input_dir, args.output_dir, force=args.force, verify=args.verify)
    except NextnError as error:
        print(f"nextn-export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nextn-export: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{args.output_dir}: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
