"""How fast a checkpoint loads, part by part: `python -m bench.load_speed DIRECTORY [--config CONFIG]`.

A directory that does not exist is made first from --config, with the names, shapes, dtypes and shards of an
official checkpoint and bytes that repeat (loading does not look at values). Then each part of a load is timed
alone, so that one sees which bounds it:

| part | what is timed |
| plan | headers read, every tensor found and checked |
| read | all tensors brought to the device and dropped: storage, the page cache, a GPU's link |
| memory | as much memory as the model has written for the first time, without any file: page faults |
| load | what a start does: build the model and load it |
| fill | all tensors loaded again into the same model, whose memory has been written by now |

`--cache cold` drops the files from the page cache before each part, `--cache warm` reads them once before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig
from nextn.kernels.ref.gemm import Block
from nextn.models.checkpoint import Checkpoint, read_config
from nextn.models.deepseek import DeepseekModel
from nextn.models.loader import default_readers, load_checkpoint, part_bytes, plan_load
from nextn.models.mtp import NextN
from nextn.models.output import (
    SHARD_BYTES,
    NewTensor,
    forget_cached,
    parse_size,
    run_command,
)
from nextn.models.random_checkpoint import CODES, StoredAs, write_made
from nextn.models.reader import host_bound
from nextn.models.specs import TensorSpec
from nextn.models.weights import Models, build_models, copy_names, is_ignored, meta_models

PATTERN_BYTES = 32 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 with a sentence when the checkpoint cannot be made or loaded."""
    args = _parser().parse_args(argv)

    def work() -> None:
        if not args.directory.exists() or not any(args.directory.iterdir()):
            make_checkpoint(read_config(args.config or args.directory), args.directory, args.shard_size)
        run(args)

    return run_command("load_speed", work)


def make_checkpoint(config: dict[str, Any], out: Path, shard_size: int) -> None:
    """Write an official checkpoint of `config` as fast as the disk takes it: FP8 if the config says so."""
    stored_as: StoredAs = "fp8" if config.get("quantization_config") else "bf16"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (PATTERN_BYTES,), dtype=torch.uint8, generator=generator).numpy().data
    scales = torch.full((PATTERN_BYTES // 4,), 1e-3).view(torch.uint8).numpy().data

    def pieces(pattern: memoryview, nbytes: int) -> Iterator[memoryview]:
        return (pattern[: nbytes - at] for at in range(0, nbytes, PATTERN_BYTES))

    def make(spec: TensorSpec, tensors: Mapping[str, Tensor], block_size: Block) -> list[NewTensor]:
        """Weights repeat a pattern without NaN in any dtype; scales are all 1e-3."""
        return [
            NewTensor(
                name, CODES[tensor.dtype], tuple(tensor.shape),
                partial(pieces, scales if name == spec.scale_name else codes, tensor.nbytes),
            )
            for name, tensor in tensors.items()
        ]  # fmt: skip

    write_made(config, out, make, stored_as, seed="a pattern", shard_size=shard_size, progress=True)


def run(args: argparse.Namespace) -> None:
    """Time every part and print a row for each."""
    device, path = torch.device(args.device), args.directory
    cfg, checkpoint = ModelConfig.from_dir(path), Checkpoint(path)
    files = sorted({checkpoint.file_of(name) for name in checkpoint.names()})
    copies = copy_names(cfg.nextn_layer)
    options: dict[str, Any] = {
        "skip": lambda name: is_ignored(name) or name in copies, "block_size": cfg.weight_block_size
    }  # fmt: skip
    target, nextn = meta_models(cfg)
    nowhere = [replace(spec, load=lambda weight, scale: None) for spec in _specs(target, nextn)]
    items, _ = plan_load(checkpoint, nowhere, **options)
    nbytes, largest = sum(map(part_bytes, items)), max(map(part_bytes, items))
    bound = host_bound(default_readers(), largest)
    print(f"{path}: {nbytes / 1e9:.2f} GB in {len(items)} tensors; {default_readers()} readers; {device}")
    print(f"page cache {args.cache}; bound of host memory beside the model {bound / 1e9:.2f} GB")
    built: list[Models] = []

    def load(specs: list[TensorSpec]) -> str:
        report = load_checkpoint(path, specs, device=device, progress=False, **options)
        return f"{report.read_bytes / 1e9:.2f} GB from {report.files} of {len(files)} files"

    def start() -> str:
        built.append(
            build_models(
                path, cfg, EngineConfig(device=args.device), device, torch.bfloat16, 1,
                keep_fp8=False if args.dequantize else None, progress=False,
            )
        )  # fmt: skip
        return "model built and loaded"

    work: dict[str, Callable[[], str]] = {
        "plan": lambda: f"{len(plan_load(Checkpoint(path), nowhere, **options)[0])} tensors",
        "read": lambda: load(nowhere),
        "memory": lambda: _first_touch(nbytes, device),
        "load": start,
        "fill": lambda: load(list(_specs(built[0].target, built[0].nextn))),
    }
    for part, timed in work.items():
        _set_cache(files, args.cache)
        _row(part, timed, nbytes, device)


def _specs(target: DeepseekModel, nextn: NextN | None) -> Iterator[TensorSpec]:
    yield from target.specs()
    if nextn is not None:
        yield from nextn.specs()


def _first_touch(nbytes: int, device: torch.device) -> str:
    """Write as much fresh memory as the model has."""
    pieces = []
    for begin in range(0, nbytes, 1 << 30):
        size = min(1 << 30, nbytes - begin)
        pieces.append(torch.empty(size, dtype=torch.uint8, device=device).fill_(1))
    return f"{len(pieces)} pieces of at most a GiB"


def _row(part: str, work: Callable[[], str], nbytes: int, device: torch.device) -> None:
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    start = time.perf_counter()
    what = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = _memory("VmHWM") - before
    rate = "" if part == "plan" else f"{nbytes / seconds / 1e9:6.2f} GB/s"
    print(f"{part:7} {seconds:7.2f} s {rate:12} host memory +{peak / 1e9:5.2f} GB  {what}", flush=True)


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _set_cache(files: Sequence[Path], state: str) -> None:
    """Drop the files from the page cache, or bring them into it."""
    for file in files:
        if state == "cold":
            forget_cached(file)
            continue
        with file.open("rb") as stream:
            while stream.read(PATTERN_BYTES):
                pass


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.load_speed", description=description)
    option = parser.add_argument
    option("directory", type=Path, help="checkpoint; made from --config if it does not exist")
    option("--config", type=Path, help="config.json, or a directory that has one")
    option("--shard-size", type=parse_size, default=SHARD_BYTES, help="most bytes a file (default 4.3 GB)")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--cache", choices=["warm", "cold"], default="warm")
    option("--dequantize", action="store_true", help="FP8 weights become bf16, as on a CPU by default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
