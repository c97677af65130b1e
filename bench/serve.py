"""An engine, or a server, under load: throughput, latencies and decode cycles at each point of a sweep.

`python -m bench.serve MODEL [engine flags] --requests 1024 --concurrency 16,64 --spec-compare` drives an
engine in this process; with `--url http://...` the same load goes to a running OpenAI server, and MODEL says
only which tokens exist. TTFT counts from when a request was due; TPOT is a request's mean time a token after
its first; a gap is the time from one delivery to the next, which may bring several tokens. Random weights
(`--load-format dummy`) accept nearly no draft: `--simulate-accept-length` sets what a cycle emits.

`--scenario long-prompt`: what a long prompt does to streams that are being decoded, and they to it.
`--scenario prefix-hit`: time to first token behind a shared prompt that is cached, and that is not.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.http_load import Load, Server
from bench.jsonl import write_jsonl
from bench.load import Cycles, Job, Median, Point, Run, Session, figures, make_jobs, sharegpt
from bench.scenarios import SCENARIOS
from nextn.config import ModelConfig
from nextn.engine import busy
from nextn.engine.bench import BatchRun, environment, random_prompts, simulated_lengths, spare_tokens
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.graphs import buckets
from nextn.engine.launched import Launched
from nextn.engine.llm import load_engine, resolve_model
from nextn.engine.scheduler import Running
from nextn.engine.worker import SimulatedLength
from nextn.errors import ConfigError, NextnError

logger = logging.getLogger(__name__)

WARMUP = (96, 8)
"""Tokens in and out of requests that only compile."""
MIN_CYCLES = 30
"""Cycles at one occupancy below which their median says little."""
REFERENCE_TOKENS = 64
REFERENCES = 8
"""Occupancies of a point that are reported, those seen most often."""
COLUMNS = (
    ("point", "point", "<16"),
    ("spec", "spec", "<8"),
    ("req/s", "requests_per_s", "9.2f"),
    ("in tok/s", "input_tokens_per_s", "11.1f"),
    ("out tok/s", "output_tokens_per_s", "11.1f"),
    ("TTFT p50", "ttft_p50_ms", "11.1f"),
    ("p99 ms", "ttft_p99_ms", "9.1f"),
    ("TPOT p50", "tpot_p50_ms", "9.2f"),
    ("p99 ms", "tpot_p99_ms", "9.2f"),
    ("gap p50", "gap_p50_ms", "9.2f"),
    ("p99 ms", "gap_p99_ms", "9.2f"),
    ("accept", "accept_length", "8.2f"),
    ("cached", "cached_share", "8.1%"),
    ("preempt", "preemptions", "9.0f"),
    ("failed", "failed", "8.0f"),
)
"""Title, key and format of each figure of a point."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 with a sentence on a wrong flag, 1 where a request failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    try:
        points = _points(args)
        measured = serve_url(args, points) if args.url else serve_engine(args, points)
        results = write_jsonl(args.jsonl, measured)
    except NextnError as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 2
    return int(any(result.get("failed") for result in results))


def serve_engine(args: argparse.Namespace, points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Build the engine and run what is asked for on it."""
    engine = _engine(args, points)
    if args.scenario:
        yield SCENARIOS[args.scenario](engine, args)
        return
    specs = list(dict.fromkeys((engine.spec, None))) if args.spec_compare else [engine.spec]
    print(f"{_heading(engine, args)}\n{_titles()}", flush=True)
    cycles = []
    for point in points:
        for spec in specs:
            engine.set_spec(spec)
            result, seen = measure(engine, point, args)
            print(_row(result), flush=True)
            yield result
            cycles.append((point, spec, seen.medians(MIN_CYCLES)))
    for point, spec, medians in cycles:
        engine.set_spec(spec)
        yield from report_cycles(engine, point, medians, args)
    for spec in specs if args.trace else ():
        engine.set_spec(spec)
        yield trace_load(engine, points[-1], args)


def measure(engine: Engine, point: Point, args: argparse.Namespace) -> tuple[dict[str, Any], Cycles]:
    """One point of the sweep with the engine's present tree: its figures, and its decode cycles."""
    before = engine.stats()["preemptions"]
    session = Session(engine, args.temperature, f"{point}, {engine.spec}")
    seconds = Run(session, _jobs(args, engine), point, args.seed).finish()
    engine.check_integrity()
    result = {
        "kind": "load",
        "point": str(point),
        **environment(engine),
        **_workload(args),
        "spec": str(engine.spec or "plain"),
        "weights": "random" if args.load_format == "dummy" else "checkpoint",
        "accept_mode": "simulated" if args.simulate_accept_length else "real",
        **figures(session.records.values(), seconds),
        "preemptions": engine.stats()["preemptions"] - before,
        "decode_share": session.cycles.decode_share,
    }
    return result, session.cycles


def report_cycles(
    engine: Engine, point: Point, medians: Sequence[Median], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The median decode cycle at each occupancy, and beside it the cycle of such a batch by itself."""
    often = sorted(medians, key=lambda each: -each.cycles)[:REFERENCES]
    for each in sorted(often, key=lambda each: each.occupancy):
        line: dict[str, Any] = {
            "kind": "cycle",
            "point": str(point),
            "spec": str(engine.spec or "plain"),
            "occupancy": each.occupancy,
            "cycles": each.cycles,
            "context": round(each.context),
            "cycle_ms": round(each.ms, 3),
        }
        text = (
            f"{point!s:16} {line['spec']:7} {each.occupancy:3} rows, mean context {each.context:5.0f}: "
            f"{each.ms:8.3f} ms a cycle, median of {each.cycles}"
        )
        if args.cycle_reference:
            alone = reference_ms(engine, each.occupancy, round(each.context), args.seed)
            line |= {"alone_ms": round(alone, 3), "deviation_percent": round(100 * (each.ms / alone - 1), 2)}
            text += f"; by itself {alone:8.3f} ms, {line['deviation_percent']:+6.2f} %"
        print(text, flush=True)
        yield line


def reference_ms(engine: Engine, batch: int, context: int, seed: int) -> float:
    """Median milliseconds of a decode cycle of equal rows at this context, with nothing else going on."""
    spec = engine.spec
    room = REFERENCE_TOKENS + spare_tokens(spec)
    context = max(1, min(context, engine.max_model_len - room))
    run = BatchRun(engine, random_prompts(engine, context, batch, seed), room, 0.0)
    cycle_ms = statistics.median(run.measure(spec, REFERENCE_TOKENS).cycle_ms)
    run.close()
    return cycle_ms


def trace_load(engine: Engine, point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """The point's load once more, a stretch of its steps under the profiler; prints how busy the GPU is."""
    spec = str(engine.spec or "plain")
    path: Path = args.trace
    if args.spec_compare:
        path = path.with_name(f"{spec.replace('/', '-')}-{path.name}")
    session = Session(engine, args.temperature, f"trace, {spec}")
    run = Run(session, _jobs(args, engine), point, args.seed)
    while run.ended < args.requests // 4:
        run.advance()
    session.cycles = Cycles()

    def steps() -> None:
        for _ in range(args.trace_steps):
            if not run.is_done:
                run.advance()

    seen = busy.record(path, steps)
    if run.is_done:
        raise ConfigError("the load ended while it was traced; raise --requests or lower --trace-steps")
    session.abort()
    decode = session.cycles.decode_share
    result = {
        "kind": "trace",
        "point": str(point),
        **environment(engine),
        **_workload(args),
        "spec": spec,
        "steps": args.trace_steps,
        "span_ms": round(seen.span_us / 1e3, 3),
        "busy_share": round(seen.share, 5),
        "decode_share": round(decode, 4),
        "busy_share_in_decode": round(seen.share_in_decode(decode), 5),
    }
    print(
        f"{point!s:16} {spec:7} GPU busy {seen.share:.2%} of {args.trace_steps} traced steps "
        f"({result['span_ms']} ms, {seen.launches} launches), in decode at least "
        f"{seen.share_in_decode(decode):.2%}: it takes {decode:.1%} of the time, all pauses counted as its\n"
        f"{path}; longest pauses in us:"
    )
    for pause in seen.pauses:
        print(f"  {pause.us:9.1f} after {pause.before[:48]}, before {pause.after[:48]}")
    return result


def serve_url(args: argparse.Namespace, points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """The sweep against a running server; preemptions come from its metrics, if it has them."""
    cfg = ModelConfig.from_dir(resolve_model(args.model))
    server = Server(args.url, args.api_key)
    max_len = args.max_model_len or cfg.max_position_embeddings
    jobs = _make_jobs(args, cfg.vocab_size, max_len)
    print(f"{args.url} {server.model}: {_describe(jobs, args)}\n{_titles()}", flush=True)
    for point in points:
        before = server.metrics()
        # Other tokens each time: none must find cached what an earlier point has computed.
        jobs = _make_jobs(args, cfg.vocab_size, max_len, f"{point} {time.time()}")
        load = server.run(jobs, point, args.temperature, args.seed)
        result = _url_result(load, before, server.metrics(), point, args)
        print(_row(result), flush=True)
        for reason in sorted({each.failed for each in load.records if each.failed})[:3]:
            print(f"  failed: {reason}", flush=True)
        yield result


def _url_result(
    load: Load,
    before: Mapping[str, float],
    after: Mapping[str, float],
    point: Point,
    args: argparse.Namespace,
) -> dict[str, Any]:
    key = "nextn_preemptions_total"
    return {
        "kind": "load",
        "point": str(point),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "url": args.url,
        **_workload(args),
        "spec": "server",
        **figures(load.records, load.seconds),
        "preemptions": after[key] - before[key] if key in before else None,
    }


def _engine(args: argparse.Namespace, points: Sequence[Point]) -> Engine:
    """The engine, with rows for every request that a point keeps open, after a warm-up."""
    config = engine_config(args)
    if args.spec_compare and config.spec is None:
        raise ConfigError("--spec-compare needs speculation; drop --spec off")
    asked = args.streams + 1 if args.scenario == "long-prompt" else 1
    rows = max(config.max_running_requests, asked, *(point.concurrency or 1 for point in points), 1)
    started = time.perf_counter()
    engine = load_engine(args.model, replace(config, max_running_requests=rows))
    if args.simulate_accept_length:
        simulate(engine, args.simulate_accept_length, args.seed)
    warm_up(engine, rows, args.seed)
    logger.info("ready and warm after %.1f s", time.perf_counter() - started)
    return engine


def simulate(engine: Engine, mean: float, seed: int) -> None:
    """From now on every speculative step accepts drawn lengths, and keeps the draft's own tokens."""
    if engine.spec is None or not 1.0 <= mean <= engine.spec.width:
        raise ConfigError(
            f"--simulate-accept-length {mean} must be 1 to what {engine.spec or 'a tree'} can emit"
        )
    lengths = simulated_lengths(mean, seed)
    engine.worker.launch = partial(_launch_simulated, engine.worker.launch, lengths)  # type: ignore[method-assign]


def _launch_simulated(
    launch: Callable[..., Launched], lengths: Any, entries: tuple[Running, ...], spec: Any, **options: Any
) -> Launched:
    simulation = SimulatedLength(next(lengths)) if spec is not None else None
    return launch(entries, spec, **{**options, "simulation": simulation})


def warm_up(engine: Engine, rows: int, seed: int) -> None:
    """Compile and record what first requests would: both kinds of decode steps, with batches of all sizes."""
    spec = engine.spec
    sizes = buckets(rows)[::-1]  # of most rows first: what has fewer then fits the memory of what has more
    for shape in dict.fromkeys((spec, None)):
        engine.set_spec(shape)
        session = Session(engine, name=f"warm-up, {shape}")
        for size in sizes if engine.worker.runs_ahead else (rows,):
            vocab, max_len = engine.worker.models.cfg.vocab_size, engine.max_model_len
            for job in make_jobs(size, WARMUP, vocab=vocab, max_len=max_len, seed=seed + size):
                session.add(job)
            session.drain()
    engine.set_spec(spec)


def _jobs(args: argparse.Namespace, engine: Engine) -> list[Job]:
    return _make_jobs(args, engine.worker.models.cfg.vocab_size, engine.max_model_len)


def _make_jobs(args: argparse.Namespace, vocab: int, max_len: int, salt: str = "") -> list[Job]:
    return make_jobs(
        args.requests,
        sharegpt(args.output_scale) if args.lengths == "sharegpt" else (args.input_len, args.output_len),
        vocab=vocab,
        max_len=max_len,
        shared_prefix=args.shared_prefix,
        seed=args.seed,
        salt=salt,
    )


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on besides its point and its environment."""
    names = ("model", "requests", "lengths", "shared_prefix", "temperature", "seed")
    more = ("input_len", "output_len") if args.lengths == "fixed" else ("output_scale",)
    return {name: getattr(args, name) for name in (*names, *more)}


def _heading(engine: Engine, args: argparse.Namespace) -> str:
    """What the table is of, in words."""
    real = environment(engine)
    text = f"{args.model} on {real['device']}, {real['dtype']}, {real['commit']}: "
    text += _describe(_jobs(args, engine), args)
    if args.simulate_accept_length:
        return f"{text}; acceptance is SIMULATED, {args.simulate_accept_length} tokens a cycle"
    if args.load_format == "dummy":
        text += "; random weights, of which hardly any draft is right: acceptance says nothing here"
    return text


def _describe(jobs: Sequence[Job], args: argparse.Namespace) -> str:
    mean_in = statistics.fmean(len(job.prompt) for job in jobs)
    mean_out = statistics.fmean(job.output_len for job in jobs)
    return f"{len(jobs)} requests, lengths {args.lengths}, mean {mean_in:.0f} in and {mean_out:.0f} out"


def _titles() -> str:
    return "".join(_pad(title, form) for title, _, form in COLUMNS)


def _row(result: Mapping[str, Any]) -> str:
    shown = []
    for _, key, form in COLUMNS:
        value = result[key]
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        shown.append(_pad("-", form) if missing else format(value, form))
    return "".join(shown)


def _pad(text: str, form: str) -> str:
    """A title, or a figure that is not there, as wide as the figures of its column."""
    width = int(form.lstrip("<").split(".")[0].rstrip("f%"))
    return text.ljust(width) if form.startswith("<") else text.rjust(width)


def _points(args: argparse.Namespace) -> list[Point]:
    """The points of the sweep; raises `ConfigError` on flags that exclude each other."""
    own = ("scenario", "spec_compare", "cycle_reference", "trace", "simulate_accept_length")
    given = [f"--{name.replace('_', '-')}" for name in own if getattr(args, name)]
    if args.url and given:
        raise ConfigError(f"--url excludes {' and '.join(given)}, for which the engine must run here")
    if args.scenario and args.trace:
        raise ConfigError("--trace profiles a load; drop --scenario")
    if args.trace:
        busy.check_gpu()
    if args.concurrency and args.request_rate:
        raise ConfigError("--concurrency and --request-rate exclude each other; leave one of them out")
    for name in ("requests", "input_len", "output_len", "repeats", "new_tokens", "streams", "trace_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0.0 < args.output_scale <= 4.0:
        raise ConfigError("--output-scale must be above 0 and at most 4")
    if args.scenario:
        return []
    if args.request_rate:
        return [Point(rate=rate) for rate in _numbers(args.request_rate, float, "--request-rate")]
    return [Point(concurrency=size) for size in _numbers(args.concurrency or "16", int, "--concurrency")]


def _numbers(text: str, kind: Callable[[str], Any], flag: str) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is neither a number nor several with commas between") from None
    if not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{flag} {text!r} must be above 0")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    _add_load_flags(parser.add_argument_group("load"))
    _add_report_flags(parser.add_argument_group("what is reported"))
    _add_scenario_flags(parser.add_argument_group("scenarios"))
    return parser


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--requests", type=int, default=256, help="requests a point (default 256)")
    group.add_argument("--concurrency", metavar="C[,C]", help="requests open at a time (default 16)")
    group.add_argument("--request-rate", metavar="R[,R]", help="requests a second, a Poisson process")
    group.add_argument(
        "--lengths",
        choices=("sharegpt", "fixed"),
        default="sharegpt",
        help="sharegpt: log-normal, about means of 161 tokens in and 338 out; fixed: --input-len and "
        "--output-len (default sharegpt)",
    )
    group.add_argument(
        "--output-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="of sharegpt: answers are so many times as long, and the load as much shorter (default 1)",
    )
    group.add_argument("--input-len", type=int, default=1024, help="prompt tokens (default 1024)")
    group.add_argument("--output-len", type=int, default=128, help="tokens to generate (default 128)")
    group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="TOKENS", help="tokens that all prompts begin with"
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    group.add_argument(
        "--simulate-accept-length",
        type=float,
        metavar="L",
        help="a speculative cycle emits L tokens on average whatever the target says, for random weights",
    )
    group.add_argument("--url", help="send the load to this server, not to an engine in this process")
    group.add_argument("--api-key", help="key of that server")


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--spec-compare", action="store_true", help="run each point plainly too")
    group.add_argument(
        "--cycle-reference",
        action="store_true",
        help="measure the decode cycle of each occupancy by itself too, as bench_one_batch does",
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="profile steps of the last point and write the trace here"
    )
    group.add_argument("--trace-steps", type=int, default=300, help="steps to profile (default 300)")
    group.add_argument("--jsonl", type=Path, help="write the results here, one JSON object a line")


def _add_scenario_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--scenario", choices=tuple(SCENARIOS), help="run this instead of a load")
    sizes = {
        "--streams": (8, "streams beside the long prompt"),
        "--long-prompt": (100_000, "tokens of the long prompt"),
        "--stream-prompt": (1024, "prompt tokens of a stream"),
        "--stream-tokens": (16_384, "most tokens that a stream generates"),
        "--shared-prompt": (32_768, "tokens of the shared prompt"),
        "--new-tokens": (16, "tokens behind it"),
        "--repeats": (5, "requests of each kind behind it"),
    }
    for flag, (default, text) in sizes.items():
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")


if __name__ == "__main__":
    sys.exit(main())
