"""Times each kernel on a GPU: microseconds, GB/s or TFLOP/s and the share of the device's measured peak.

`python -m bench.kernels [NAME ...] [--tune]` runs the cases of bench/kernel_cases. A case is checked against
its twin first; after a failed check nothing of it is timed and the exit status is 1. With --tune the
candidate configurations of each case are timed too, best first and unchecked; --jobs processes compile them
beforehand.
Times are of CUDA graph replays over inputs that rotate past the L2, so weights and caches come from memory,
as in a model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from bench.jsonl import write_jsonl
from nextn.engine.bench import commit

CALLS = 24  # calls in one graph
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Runner:
    """One case on a device: `run` is one call and rotates through its inputs; `check` compares with the twin.

    candidates: the same call under other configurations, by label; only --tune runs them.
    """

    run: Callable[[], object]
    check: Callable[[], None]
    candidates: dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Case:
    """A call worth timing: `bytes` is the least that it must move through memory, `flops` what it must do."""

    name: str
    bytes: int
    flops: int
    make: Callable[[torch.device], Runner]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table; `share` is of the peak that bounds the case (bandwidth or matrix rate)."""

    family: str
    case: str
    config: str
    us: float
    gb_per_s: float
    tflops: float
    share: float


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the card does at best, measured here and now."""

    gb_per_s: float
    tflops: float


def time_calls(call: Callable[[], object]) -> float:
    """Median microseconds of one call inside a graph of `CALLS`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def measure_peaks(device: torch.device) -> Peaks:
    """A large elementwise kernel (bytes read plus written) and a large bf16 product."""
    source = torch.zeros(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy_us = time_calls(lambda: torch.neg(source, out=target))
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product_us = time_calls(lambda: left @ right)
    return Peaks(2 * source.nbytes / copy_us / 1e3, 2 * 8192**3 / product_us / 1e6)


def machine(peaks: Peaks) -> dict[str, object]:
    """What a figure depends on besides its case."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "commit": commit(),
        "peak_gb_per_s": round(peaks.gb_per_s),
        "peak_tflops": round(peaks.tflops),
    }


def result(family: str, case: Case, config: str, us: float, peaks: Peaks) -> Result:
    """Rates of one timing."""
    rate, work = case.bytes / us / 1e3, case.flops / us / 1e6
    return Result(family, case.name, config, us, rate, work, max(rate / peaks.gb_per_s, work / peaks.tflops))


def run_family(family: str, cases: Sequence[Case], peaks: Peaks, *, tune: bool) -> tuple[list[Result], int]:
    """Check and time cases; returns the results and how many checks failed."""
    device, results, failed = torch.device("cuda"), [], 0
    for case in cases:
        runner = case.make(device)
        try:
            runner.check()
        except AssertionError as error:
            failed += 1
            print(f"FAILED {family}: {case.name}: {error}", flush=True)
            continue
        timed = [result(family, case, "default", time_calls(runner.run), peaks)]
        if tune:
            timed += _tune(family, case, runner, peaks)
        results += timed
        for each in timed:
            print(line(each), flush=True)
        del runner
        torch.cuda.empty_cache()
    return results, failed


def _tune(family: str, case: Case, runner: Runner, peaks: Peaks, keep: int = 4) -> list[Result]:
    """The best candidates; one that does not fit the device is named and left out."""
    timed = []
    for label, call in runner.candidates.items():
        try:
            timed.append(result(family, case, label, time_calls(call), peaks))
        except RuntimeError as error:  # Triton's OutOfResources, launch failures
            print(f"  {case.name} {label}: {str(error).splitlines()[0]}", flush=True)
    return sorted(timed, key=lambda each: each.us)[:keep]


def line(each: Result) -> str:
    """One aligned line."""
    return (
        f"{each.case:44} {each.config:34} {each.us:9.2f} us {each.gb_per_s:7.0f} GB/s "
        f"{each.tflops:7.1f} TFLOP/s {100 * each.share:5.1f} %"
    )


def compile_ahead(args: argparse.Namespace) -> None:
    """Fill Triton's cache on disk from `args.jobs` processes, each with every n-th configuration."""
    flags = [*args.names, "--match", args.match, *(["--tune"] if args.tune else [])]
    command = [sys.executable, "-m", "bench.kernels", *flags, "--shard"]
    workers = [subprocess.Popen([*command, f"{i}/{args.jobs}"]) for i in range(args.jobs)]
    if any([worker.wait() for worker in workers]):
        print("a compiling process failed; what it left out is compiled when it is timed", flush=True)


def compile_shard(cases: Sequence[Case], shard: str, *, tune: bool) -> None:
    """Call each of this shard's configurations once."""
    part, parts = map(int, shard.split("/"))
    for number, case in enumerate(cases):
        runner = case.make(torch.device("cuda"))
        calls = [runner.run, *(runner.candidates.values() if tune else ())]
        for call in calls[(part - number) % parts :: parts]:
            # A configuration that does not fit is named when it is timed.
            with contextlib.suppress(RuntimeError):
                call()
        del runner, calls
        torch.cuda.empty_cache()


def families() -> list[str]:
    """Names of the case files."""
    return sorted(
        path.stem for path in Path(__file__).with_name("kernel_cases").glob("*.py") if path.stem[0] != "_"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="families to run (default: all)")
    parser.add_argument("--tune", action="store_true", help="time the candidate configurations too")
    parser.add_argument("--match", default="", help="only cases whose name holds this text")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand (default 0)")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    parser.add_argument("--jsonl", type=Path, help="write every result here, one JSON object a line")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(families()):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(families())}")
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU; there is none here")
    chosen = {
        family: [
            case
            for case in importlib.import_module(f"bench.kernel_cases.{family}").cases()
            if args.match in case.name
        ]
        for family in args.names or families()
    }
    if args.shard:
        compile_shard([case for cases in chosen.values() for case in cases], args.shard, tune=args.tune)
        return 0
    if args.jobs:
        compile_ahead(args)
    peaks = measure_peaks(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: copy {peaks.gb_per_s:.0f} GB/s, bf16 {peaks.tflops:.0f} TFLOP/s")
    results, failed = [], 0
    for family, cases in chosen.items():
        print(f"-- {family}", flush=True)
        timed, bad = run_family(family, cases, peaks, tune=args.tune)
        results, failed = results + timed, failed + bad
    where = machine(peaks)
    write_jsonl(args.jsonl, [{**where, **asdict(each)} for each in results])
    if failed:
        print(f"{failed} cases are wrong and were not timed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
