"""Where the time of a decode step goes: a split by kernel, the share of it that the GPU is busy, a trace.

`python scripts/profile_step.py MODEL --load-format dummy --batch-size 1 --input-len 1024 --trace step.json`
profiles steps as they run in service (captured, the host ahead). The trace opens in Perfetto or
chrome://tracing. Kernels that overlap (programmatic dependent launch) count the time that they wait for the
one before; --serial shows what each takes by itself. Needs a GPU.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nextn.config import SpecConfig
from nextn.engine.bench import BatchRun, make_prompts, simulated_lengths, spare_tokens
from nextn.engine.busy import Launch, export, merge
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.llm import resolve_model
from nextn.errors import ConfigError, NextnError


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 with a sentence on a wrong flag or machine."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    try:
        if not torch.cuda.is_available():
            raise ConfigError("a step is profiled on a GPU; there is none here")
        if args.serial:
            from nextn.kernels import launch  # brings Triton, which only a GPU machine need have

            launch.has_dependent_launch = lambda: False  # read at every launch, so at capture
        config = engine_config(args)
        room = args.input_len + 8 * spare_tokens(config.spec) + 4 * args.output_len
        config = replace(
            config, max_running_requests=args.batch_size, max_model_len=config.max_model_len or room
        )
        engine = Engine.from_config(resolve_model(args.model), config)
        for spec in dict.fromkeys((engine.spec, None)):
            report(spec, *trace(engine, spec, args), args)
    except NextnError as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 2
    return 0


def trace(engine: Engine, spec: SpecConfig | None, args: argparse.Namespace) -> tuple[list[Launch], int]:
    """Every device activity of the steps that bring `args.output_len` tokens, and how many steps."""
    room = args.output_len + 4 * spare_tokens(spec)
    run = BatchRun(engine, make_prompts(args, engine, args.batch_size), room, 0.0)
    lengths = simulated_lengths(args.simulate_accept_length, args.seed) if spec else None
    run.measure(spec, 1, lengths)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        measured = run.measure(spec, args.output_len, lengths, warmup=0)
        torch.cuda.synchronize()
    run.close()
    if args.trace:
        path = args.trace.with_stem(f"{args.trace.stem}-{str(spec or 'plain').replace('/', '-')}")
        export(profiler, path)
        print(f"trace: {path}")
    steps = len(measured.cycle_ms) + int(engine.worker.runs_ahead)  # one more was under way at the end
    return list(_launches(profiler)), steps


def _launches(profiler: profile) -> Iterator[Launch]:
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > 0:
            yield Launch(event.name, event.time_range.start, event.time_range.end)


def report(spec: SpecConfig | None, launches: Sequence[Launch], steps: int, args: argparse.Namespace) -> None:
    """Print the split by kernel, per step, and how busy the device was."""
    seen = merge(launches)
    print(
        f"\n{spec or 'plain'}, batch {args.batch_size}, context {args.input_len}: {steps} steps, "
        f"{seen.span_us / steps / 1e3:.3f} ms a step, {seen.launches / steps:.0f} launches a step, "
        f"GPU busy {100 * seen.share:.1f} %"
    )
    totals: dict[str, list[float]] = defaultdict(list)
    for each in launches:
        totals[short_name(each.name)].append(each.end - each.start)
    everything = sum(map(sum, totals.values()))
    print(f"{'kernel':56} {'a step':>7} {'us each':>8} {'us a step':>10} {'share':>7}")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        total = sum(times)
        if total / everything > 0.002:
            print(
                f"{name:56} {len(times) / steps:7.1f} {total / len(times):8.2f} "
                f"{total / steps:10.1f} {100 * total / everything:6.1f}%"
            )


def short_name(name: str) -> str:
    """A kernel's name without its template arguments."""
    name = re.sub(r"^(void\s+|at::native::|\(anonymous namespace\)::)+", "", name)
    return re.split(r"[<(]", name, maxsplit=1)[0][:56] or name[:56]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="profile_step", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    parser.add_argument("--batch-size", type=int, default=1, help="requests in the batch (default 1)")
    parser.add_argument("--input-len", type=int, default=1024, help="prompt tokens a request (default 1024)")
    parser.add_argument("--output-len", type=int, default=24, help="tokens a request to profile (default 24)")
    parser.add_argument("--prompts", help="JSONL with a 'prompt' a line (default: random token ids)")
    parser.add_argument(
        "--simulate-accept-length", type=float, default=2.5, help="tokens a cycle emits (default 2.5)"
    )
    parser.add_argument(
        "--serial",
        action="store_true",
        help="launch each kernel when the one before has ended, so that times do not count waiting",
    )
    parser.add_argument("--trace", type=Path, help="write a trace here, one file a shape")
    return parser


if __name__ == "__main__":
    sys.exit(main())
