"""`bench_one_batch`: one process, no server; a speculative and a plain run over the same prompts.

Prints a table for people and, last, one JSON object a case for machines. Speculation on random weights is
almost never accepted, so `--simulate-accept-length` fixes how many tokens a cycle emits; every figure says
which it was (`accept_mode`, `token_mode`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nextn import __version__
from nextn.config import EngineConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.launched import Launched
from nextn.engine.llm import load_engine
from nextn.engine.request import Request, SamplingParams
from nextn.engine.scheduler import DecodeBatch, PrefillBatch, Running
from nextn.engine.stats import Acceptance
from nextn.engine.worker import SimulatedLength
from nextn.errors import ConfigError, NextnError
from nextn.models.moe import Gate

logger = logging.getLogger(__name__)

WARMUP_CYCLES = 3
PHASE_CYCLES = 5
FIXED_TOKEN = 100


class BatchRun:
    """One batch of equal requests driven by hand, so that each cycle can be timed and simulated.

    `measure` may be called several times, with other shapes; the rows go on from where they are. output_len:
    most tokens that a row emits in all. options: further fields of `SamplingParams`.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        output_len: int,
        temperature: float,
        **options: Any,
    ) -> None:
        self.engine = engine
        check_rows(len(prompts), engine.worker.state.scratch_row)
        params = SamplingParams(
            max_tokens=output_len, temperature=temperature, seed=0, ignore_eos=True, **options
        )
        salt = secrets.token_hex(8)  # of its own: no batch begins with what an earlier one has computed
        for index, prompt in enumerate(prompts):
            engine.validate(list(prompt), params)
            engine.scheduler.add(Request(f"bench-{index}", list(prompt), params, cache_salt=salt))
        self.entries: tuple[Running, ...] = ()
        self.prefill_ms = self._prefill()

    def measure(
        self,
        spec: SpecConfig | None,
        tokens: int,
        lengths: Iterator[int] | None = None,
        fixed: int | None = None,
        warmup: int = WARMUP_CYCLES,
    ) -> Measured:
        """Run cycles until a request has emitted `tokens`; the first `warmup` do not count.

        Others may have emitted fewer: were they to go on, the batch would be smaller.
        """
        emitted, done = [0] * len(self.entries), Measured()
        flying: Launched | None = None
        landed, count = time.perf_counter(), 0
        while max(emitted) < tokens:
            launched = self._launch(spec, lengths, fixed, ahead=flying is not None)
            if not self.engine.worker.runs_ahead:
                flying = launched
            if flying is not None:
                runs = self._land(flying)
                now, count = time.perf_counter(), count + 1
                if count > warmup:
                    done.cycle_ms.append((now - landed) * 1e3)
                    for index, run in enumerate(runs):
                        emitted[index] += len(run)
                        done.acceptance.record(len(run), flying.drafted)
                landed = now
            flying = launched if self.engine.worker.runs_ahead else None
        if flying is not None:
            self._land(flying)
        return done

    def step(
        self,
        spec: SpecConfig | None,
        lengths: Iterator[int] | None = None,
        fixed: int | None = None,
        *,
        eager: bool = False,
    ) -> list[list[int]]:
        """One decode step and its tokens."""
        return self._land(self._launch(spec, lengths, fixed, eager=eager))

    def phases(
        self, spec: SpecConfig | None, lengths: Iterator[int] | None = None, fixed: int | None = None
    ) -> dict[str, float]:
        """Median milliseconds of each phase over a few steps."""
        seen: list[dict[str, float]] = []
        for _ in range(PHASE_CYCLES + 1):
            launched = self._launch(spec, lengths, fixed, timed=True)
            self._land(launched)
            seen.append(launched.clock.milliseconds())
        return {phase: statistics.median(each[phase] for each in seen[1:]) for phase in seen[0]}

    def close(self) -> None:
        """Free the rows and the pages."""
        for entry in self.entries:
            self.engine.scheduler.finish(entry)

    def _launch(
        self,
        spec: SpecConfig | None,
        lengths: Iterator[int] | None,
        fixed: int | None,
        *,
        ahead: bool = False,
        timed: bool = False,
        eager: bool = False,
    ) -> Launched:
        worker, scheduler = self.engine.worker, self.engine.scheduler
        assert not any(entry.is_ending for entry in self.entries), "output_len has no room for this step"
        batch = scheduler.next_batch(in_flight=ahead)
        if not isinstance(batch, DecodeBatch) or batch.entries != self.entries:
            raise ConfigError("the cache is too small for this batch; raise --num-pages or --mem-fraction")
        simulated = SimulatedLength(next(lengths), fixed) if lengths else None
        return worker.launch(self.entries, spec, simulation=simulated, timed=timed, eager=eager)

    def _land(self, launched: Launched) -> list[list[int]]:
        emitted = launched.wait().tokens
        for entry, tokens in zip(self.entries, emitted, strict=True):
            entry.length += len(tokens)
            entry.request.output_tokens += tokens
        return emitted

    def _prefill(self) -> float:
        worker, scheduler = self.engine.worker, self.engine.scheduler
        started = time.perf_counter()
        known: set[Running] = set()
        done: set[Running] = set()
        while (batch := scheduler.next_batch()) and not all(entry in done for entry in scheduler.running):
            if not isinstance(batch, PrefillBatch):
                continue  # rows that are ready would decode by turns with the others' prefill
            for entry in scheduler.running:
                if entry not in known:
                    worker.start_row(entry, seed=len(known))
                    known.add(entry)
            tokens = iter(worker.prefill(batch.chunks).wait().tokens)
            for chunk in batch.chunks:
                if chunk.is_last:
                    done.add(chunk.entry)
                    chunk.entry.request.output_tokens.extend(next(tokens))
        if scheduler.waiting:
            raise ConfigError("the batch does not fit the cache; raise --num-pages or --mem-fraction")
        self.entries = tuple(scheduler.running)
        return (time.perf_counter() - started) * 1e3


def check_rows(batch: int, rows: int) -> None:
    """Raise `ConfigError` where an engine with so many rows cannot run all requests of a batch together."""
    if batch > rows:
        raise ConfigError(f"a batch of {batch} is above --max-running-requests {rows}; raise it to {batch}")


@dataclass(slots=True)
class Measured:
    """Cycles of one shape: milliseconds from one result to the next, and what they emitted."""

    cycle_ms: list[float] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def tokens_per_s(self) -> float:
        """Of one request, at the median step: what happens rarely (a draft is caught up) does not count."""
        return self.acceptance.length * 1e3 / statistics.median(self.cycle_ms)


def simulated_lengths(mean: float, seed: int) -> Iterator[int]:
    """Endless floor(mean) or ceil(mean), drawn so that the mean is `mean`."""
    draw = random.Random(seed)
    low = math.floor(mean)
    while True:
        yield low + (draw.random() < mean - low)


@contextmanager
def count_experts(engine: Engine) -> Iterator[list[int]]:
    """Collect the number of distinct experts of every target gate call while the context is open."""
    counts: list[int] = []

    def hook(_module: torch.nn.Module, _args: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        numbers = torch.unique(output[1])
        counts.append(int((numbers >= 0).sum()))

    gates = [module for module in engine.worker.models.target.modules() if isinstance(module, Gate)]
    handles = [gate.register_forward_hook(hook) for gate in gates]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def distinct_experts(
    run: BatchRun, spec: SpecConfig | None, lengths: Iterator[int] | None = None, fixed: int | None = None
) -> float:
    """Mean number of experts that one layer of the target reads in a step; 0 for a dense model."""
    with count_experts(run.engine) as counts:
        for _ in range(2):
            run.step(spec, lengths, fixed, eager=True)
    return statistics.fmean(counts) if counts else 0.0


def run_case(engine: Engine, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> dict[str, object]:
    """Measure one batch, with speculation and plainly, and return the case's JSON object."""
    spec = engine.spec
    simulate = args.simulate_accept_length
    vocab = engine.worker.models.cfg.vocab_size
    fixed = min(FIXED_TOKEN, vocab - 1) if args.token_mode == "fixed" else None
    room = args.output_len + spare_tokens(spec)
    case: dict[str, object] = {}
    if spec is not None:
        lengths = simulated_lengths(simulate, args.seed) if simulate else None
        run = BatchRun(engine, prompts, room, args.temperature)
        measured = run.measure(spec, args.output_len, lengths, fixed)
        phases = run.phases(spec, lengths, fixed)
        case = {
            **_spec_figures(measured, phases),
            "distinct_experts": round(distinct_experts(run, spec, lengths, fixed), 2),
        }
        run.close()
    run = BatchRun(engine, prompts, room, args.temperature)
    plain_lengths = simulated_lengths(1.0, args.seed) if fixed is not None else None
    plain = run.measure(None, args.output_len, plain_lengths, fixed)
    plain_experts = distinct_experts(run, None, plain_lengths, fixed)
    run.close()
    return {
        "model": args.model,
        **environment(engine),
        "batch_size": len(prompts),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "num_steps": spec.num_steps if spec else 0,
        "topk": spec.topk if spec else 0,
        "draft_tokens": spec.draft_tokens if spec else 0,
        "prefill_ms": round(run.prefill_ms, 3),
        **case,
        "plain_ms": round(statistics.median(plain.cycle_ms), 3),
        "plain_tokens_per_s": round(plain.tokens_per_s, 2),
        "plain_distinct_experts": round(plain_experts, 2),
        "accept_mode": "simulated" if simulate else "real",
        "token_mode": args.token_mode,
    }


def spare_tokens(spec: SpecConfig | None) -> int:
    """Tokens that a run emits beside the measured ones: warm-up, phases, counted experts, steps ahead."""
    return (WARMUP_CYCLES + PHASE_CYCLES + 8) * (spec.width if spec else 1)


def environment(engine: Engine) -> dict[str, object]:
    """What a figure depends on besides its case: date, device, dtype, commit and versions."""
    triton = importlib.util.find_spec("triton")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _device_name(engine.worker.state.device),
        "dtype": str(engine.worker.state.cache.dtype).removeprefix("torch."),
        "graphs": engine.worker.graphs is not None,
        "torch": torch.__version__,
        "triton": metadata.version("triton") if triton else None,
        "commit": commit(),
    }


def _spec_figures(measured: Measured, phases: dict[str, float]) -> dict[str, object]:
    """Fields of a speculative run; tokens_per_s is a request's, cycle_ms the host's clock."""
    return {
        "accept_length": round(measured.acceptance.length, 4),
        "accept_histogram": {str(k): v for k, v in sorted(measured.acceptance.by_length.items())},
        "cycle_ms": round(statistics.median(measured.cycle_ms), 3),
        **{f"{phase}_ms": round(phases[phase], 3) for phase in ("draft", "verify", "accept", "extend")},
        "tokens_per_s": round(measured.tokens_per_s, 2),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"


def commit() -> str:
    """The commit of the checkout that this file stands in, else the package's version."""
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():  # installed somewhere, perhaps inside another project's checkout
            return f"v{__version__}"
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"v{__version__}"
    return found.stdout.strip()


def make_prompts(args: argparse.Namespace, engine: Engine, batch_size: int) -> list[list[int]]:
    """`batch_size` prompts of `input_len` tokens: text of `--prompts` end to end, or random ids."""
    if args.prompts is None:
        return random_prompts(engine, args.input_len, batch_size, args.seed)
    if engine.tokenizer is None:
        raise ConfigError("--prompts needs a tokenizer, which --load-format dummy does not load")
    once = engine.tokenizer.encode("\n".join(read_texts(Path(args.prompts))), add_special_tokens=False)
    stream = once * -(-batch_size * args.input_len // len(once))
    return [stream[i * args.input_len : (i + 1) * args.input_len] for i in range(batch_size)]


def random_prompts(engine: Engine, length: int, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the same in every run."""
    draw, vocab = random.Random(seed), engine.worker.models.cfg.vocab_size
    return [random_tokens(draw, length, vocab) for _ in range(count)]


def random_tokens(draw: random.Random, count: int, vocab: int) -> list[int]:
    """Any token ids, special ones too: they cost the same."""
    return [draw.randrange(vocab) for _ in range(count)]


def read_texts(path: Path) -> list[str]:
    """The 'prompt' of each line of a JSONL file that has one; at least one is not empty."""
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        texts = [str(entry["prompt"]) for entry in entries if "prompt" in entry]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    if not any(texts):
        raise ConfigError(f"--prompts {path} has no line with a 'prompt'")
    return texts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_one_batch", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], help="requests in the batch (several cases)"
    )
    parser.add_argument("--input-len", type=int, default=1024, help="prompt tokens a request (default 1024)")
    parser.add_argument(
        "--output-len", type=int, default=256, help="tokens to generate a request (default 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (default 0, greedy)"
    )
    parser.add_argument(
        "--prompts", help="JSONL with a 'prompt' a line, laid end to end (default: random token ids)"
    )
    parser.add_argument(
        "--simulate-accept-length",
        type=float,
        help="emit this many tokens a cycle on average, whatever the target says",
    )
    parser.add_argument(
        "--token-mode",
        choices=("real", "fixed"),
        default="real",
        help="with simulation: keep the draft's tokens, or write one fixed id for each (default real)",
    )
    return parser


def _check(args: argparse.Namespace, config: EngineConfig) -> None:
    for name in ("input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.batch_size) < 1:
        raise ConfigError("--batch-size must be at least 1")
    simulate = args.simulate_accept_length
    if simulate is not None:
        if config.spec is None:
            raise ConfigError("--simulate-accept-length needs speculation; drop --spec off")
        if not 1.0 <= simulate <= config.spec.width:
            raise ConfigError(
                f"--simulate-accept-length {simulate} must be 1 to {config.spec.width} "
                f"for the tree {config.spec}"
            )
    elif args.token_mode == "fixed":
        raise ConfigError("--token-mode fixed needs --simulate-accept-length")


def _print_case(case: dict[str, object]) -> None:
    """A case as a few aligned lines."""
    line = "  ".join(
        f"{name} {case[name]}"
        for name in (
            "batch_size",
            "accept_length",
            "cycle_ms",
            "plain_ms",
            "tokens_per_s",
            "plain_tokens_per_s",
        )
        if name in case
    )
    print(line, flush=True)
    if "draft_ms" in case:
        phases = "  ".join(
            f"{phase} {case[f'{phase}_ms']}" for phase in ("draft", "verify", "accept", "extend")
        )
        print(f"  ms a phase: {phases}; histogram {case['accept_histogram']}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Console script; exit status 2 with a sentence on a wrong flag or an unusable model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    try:
        config = engine_config(args)
        _check(args, config)
        room = args.input_len + args.output_len + spare_tokens(config.spec)
        config = replace(
            config,
            max_running_requests=max(args.batch_size),
            max_model_len=config.max_model_len or room,
            prefix_cache=False,  # every case computes its prompts
        )
        engine = load_engine(args.model, config)
        cases = []
        for size in args.batch_size:
            logger.info("batch of %d: %d tokens in, %d out", size, args.input_len, args.output_len)
            cases.append(run_case(engine, make_prompts(args, engine, size), args))
            _print_case(cases[-1])
    except NextnError as error:
        print(f"bench_one_batch: {error}", file=sys.stderr)
        return 2
    for case in cases:
        print(json.dumps(case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
