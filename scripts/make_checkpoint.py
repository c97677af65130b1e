#!/usr/bin/env python3
"""Writes a checkpoint of any config.json with random weights, in the official format.

Example: scripts/make_checkpoint.py --config DeepSeek-V3/config.json --output-dir random --dtype fp8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nextn.models.checkpoint import read_config
from nextn.models.output import SHARD_BYTES, parse_size, run_command
from nextn.models.random_checkpoint import write_random_checkpoint

RawDescription = argparse.RawDescriptionHelpFormatter


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescription)
    option = parser.add_argument
    option("--config", type=Path, required=True, help="config.json, or a directory that has one")
    option("--output-dir", type=Path, required=True, help="directory to write; new or empty")
    option("--dtype", choices=["fp8", "bf16", "fp32"], default="fp8", help="how linear layers are stored")
    option("--shard-size", type=parse_size, default=SHARD_BYTES, help="most bytes a file (default 4.3 GB)")
    option("--no-nextn-copies", action="store_true", help="no embedding and head in the NextN layer")
    option("--tokenizer", type=Path, help="directory whose tokenizer files are copied")
    option("--seed", type=int, default=0, help="the same seed gives the same values (default 0)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(argv)

    def work() -> None:
        write_random_checkpoint(
            read_config(args.config),
            args.output_dir,
            stored_as=args.dtype,
            seed=args.seed,
            shard_size=args.shard_size,
            nextn_copies=not args.no_nextn_copies,
            tokenizer=args.tokenizer,
            progress=True,
        )

    return run_command("make_checkpoint", work)


if __name__ == "__main__":
    sys.exit(main())
