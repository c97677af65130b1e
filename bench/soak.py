"""A soak: mixed traffic on one engine for as long as is asked, and whether anything is lost or drifts.

`python -m bench.soak MODEL --minutes 20 [engine flags]`. Waves of requests (a burst, a steady stream, a
trickle, one as long as may be, short prompts with long answers) with random lengths, options, shared
prefixes, priorities and aborts; between waves the engine is idle. Arrivals go by steps, not by the clock. The
pool is small unless --num-pages says otherwise, so that requests are preempted. What is tested stands beside
each verdict; the exit status is 1 where one is bad, 130 where Ctrl-C ended a good run (once: it reports what
it has; twice: at once).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bench.drift import BLOCKS, Memory, StepTimes
from bench.jsonl import write_jsonl
from bench.load import Cycles, prefill_counters
from bench.traffic import Plan, Traffic, fits_grammar
from nextn.config import EngineConfig, SpecConfig
from nextn.engine.bench import environment, read_texts
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.graphs import buckets
from nextn.engine.llm import load_engine
from nextn.engine.request import Output, Request
from nextn.errors import ConfigError, NextnError, RequestError

logger = logging.getLogger(__name__)

TEXTS = Path(__file__).parent / "prompts" / "demo_heldout.jsonl"
STUCK_STEPS = 20_000
"""Steps that bring nothing in a row before the engine counts as stuck."""
WAVES = {
    "burst": (2, 2, 0),
    "steady": (2, 2, 6),
    "trickle": (4, 0, 60),
    "longest": (3, 1, 1),
    "crowd": (2, 1, 1),
}
"""Fewest requests of a wave, most of them a row (0: never more), and mean steps from one to the next."""
MAX_NAMED = 8
"""Faults that are named; the others are counted."""


class Ledger:
    """What is open, and whether each request gets what it asked for and ends exactly once."""

    def __init__(self, traffic: Traffic, kept: int, seed: int) -> None:
        """kept: how many requests that ended by themselves are kept, drawn evenly from all."""
        self.open: dict[str, Plan] = {}
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.named: list[str] = []
        self.kept: list[Plan] = []
        self._traffic, self._most_kept = traffic, kept
        self._rng = random.Random(seed)

    def fault(self, kind: str, text: str) -> None:
        """Note that something is wrong."""
        self.faults[kind] += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{kind}: {text}")
            logger.error("FAULT %s", self.named[-1])

    def begin(self, plan: Plan) -> None:
        """A request has been queued."""
        self.open[plan.request.request_id] = plan
        self.counts["requests"] += 1

    def take(self, output: Output) -> None:
        """One output of the engine."""
        plan = self.open.get(output.request_id)
        if plan is None:
            self.fault("ending", f"{output.request_id} got an output after its end")
            return
        plan.tokens += output.token_ids
        plan.text += output.text
        if output.completion_tokens != len(plan.tokens):
            text = (
                f"{output.request_id} counts {output.completion_tokens} tokens and brought {len(plan.tokens)}"
            )
            self.fault("tokens", text)
        if plan.request.params.logprobs is not None and len(output.logprobs) != len(output.token_ids):
            self.fault("tokens", f"{output.request_id} lacks log-probabilities")
        if output.finish_reason is not None:
            self._end(plan, output)

    def _end(self, plan: Plan, output: Output) -> None:
        del self.open[output.request_id]
        reason = output.finish_reason
        self.counts[str(reason)] += 1
        if (reason == "abort") != plan.was_aborted:
            self.fault("ending", f"{output.request_id} ended by {reason}, aborted: {plan.was_aborted}")
        elif reason == "error":
            self.fault("error", f"{output.request_id} ({plan.option}): {output.error}")
        elif reason == "length" and len(plan.tokens) != plan.request.params.max_tokens:
            self.fault("tokens", f"{output.request_id} ended by its limit after {len(plan.tokens)} tokens")
        elif reason == "stop" and not fits_grammar(plan):
            self.fault("grammar", f"{output.request_id}: {plan.text[:80]!r} does not follow {plan.option}")
        if reason in ("stop", "length"):
            self._keep(plan)
            self._traffic.ended(plan)

    def _keep(self, plan: Plan) -> None:
        self.counts["ended"] += 1
        if len(self.kept) < self._most_kept:
            self.kept.append(plan)
        elif (place := self._rng.randrange(self.counts["ended"])) < self._most_kept:
            self.kept[place] = plan


@dataclass(slots=True)
class Minute:
    """What the progress line counts since the one before."""

    began: float
    tokens: int = 0
    step_ms: list[float] = field(default_factory=list)


class Soak:
    """One run: waves until the time is up, then requests replayed alone, then verdicts."""

    def __init__(self, engine: Engine, rows: int, args: argparse.Namespace) -> None:
        """rows: most requests that run at the same time."""
        self.engine = engine
        seed, seconds = args.seed, 60 * args.minutes
        self.traffic = Traffic(engine, args.longest, seed, read_texts(TEXTS))
        self.ledger = Ledger(self.traffic, args.replay, seed)
        self.rng = random.Random(seed + 1)
        self._rows = rows
        self.stop = False
        self.rates: list[float] = []
        self._seconds = seconds
        self._steps, self._cycles, self._empty = StepTimes(seed), Cycles(), 0
        self._resident, self._reserved = Memory(32 * 2**20), Memory(64 * 2**20)
        self._began = time.perf_counter()
        self._minute = Minute(self._began)
        self._idle_points = self._waves = self._block = 0
        self._tree = engine.spec
        self._on_gpu = engine.worker.state.device.type == "cuda"
        self._prefilled = prefill_counters(engine.stats())
        self._replayed = self._same_alone = 0

    def run(self) -> None:
        """All of it; an error of the engine is a fault like any other, and ends the run."""
        try:
            self._warm_up()
            self._began = time.perf_counter()
            self._minute = Minute(self._began)
            while not self._is_over:
                self._wave()
            if not self.stop:
                self._replay()
        except Exception as error:  # whatever it is, the report says so and the exit status is 1
            logger.exception("the engine failed")
            self.ledger.fault("engine", f"{type(error).__name__}: {error}")

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    @property
    def _is_over(self) -> bool:
        return self.stop or self._elapsed >= self._seconds

    def _warm_up(self) -> None:
        """Record the steps that a GPU records when the first request asks for them: they take memory."""
        if not self.engine.worker.runs_ahead:
            return
        count = 0
        for spec in self._shapes():
            self.engine.set_spec(spec)
            for params in self.traffic.kinds():
                for size in reversed(buckets(self._rows)):
                    for _ in range(size):
                        count += 1
                        self.engine.add(Request(f"warm-up-{count}", self.traffic.prompt(24), params))
                    while self.engine.has_work():
                        self.engine.step()
        self.engine.set_spec(self._tree)
        logger.info("warm after %.1f s", self._elapsed)

    def _shapes(self) -> list[SpecConfig | None]:
        return list(dict.fromkeys((self._tree, None)))

    def _wave(self) -> None:
        """Requests of one kind of wave until all have ended, then a lull."""
        self._waves += 1
        # A wave's steps are alike, so a block holds whole waves: it is the one in which they began.
        self._block = min(BLOCKS - 1, int(BLOCKS * self._elapsed / self._seconds))
        self.engine.set_spec(self.rng.choice([*[self._tree] * 3, *self._shapes()]))
        for plans, pause in self._arrivals():
            for plan in plans:
                self._submit(plan)
            for _ in range(pause):
                if self._is_over:
                    break
                self._step()
            if self._is_over:
                break
        while self.ledger.open or self.engine.has_work():
            if self.stop:
                self._abort_all()
            self._step()
        self._idle()

    def _arrivals(self) -> Iterator[tuple[list[Plan], int]]:
        """Requests, and how many steps to wait behind them."""
        kind = self.rng.choice(tuple(WAVES))
        least, most, pause = WAVES[kind]
        least = max(least, self._rows // 2) if most else least
        for index in range(self.rng.randint(least, max(least, most * self._rows))):
            if self.rng.random() < 0.03:
                self._refuse()
            plans = self.traffic.draw()
            if kind == "crowd":
                plans = self.traffic.draw_growing()
            elif kind == "longest" and index == 1:
                plans = self.traffic.draw_longest()
            yield plans, round(self.rng.expovariate(1 / pause)) if pause else 0

    def _submit(self, plan: Plan) -> None:
        try:
            self.engine.add(plan.request)
        except RequestError as error:
            self.ledger.fault("refused", f"{plan.request.request_id} ({plan.option}): {error}")
            return
        self.ledger.begin(plan)
        if plan.is_to_be_aborted:
            self._abort(plan)

    def _refuse(self) -> None:
        """What cannot be served is refused at once, and nothing of it stays."""
        try:
            self.engine.add(self.traffic.draw_refused())
        except RequestError:
            self.ledger.counts["refused"] += 1
        else:
            self.ledger.fault("refused", "a request that cannot be served was taken")

    def _abort(self, plan: Plan) -> None:
        plan.was_aborted = True
        self.engine.abort(plan.request.request_id)

    def _abort_all(self) -> None:
        for plan in self.ledger.open.values():
            if not plan.was_aborted:
                self._abort(plan)

    def _step(self) -> None:
        """One step and all that is checked of it."""
        if not self.engine.has_work():
            self._cycles.pause()
            return
        outputs = self.engine.step()
        self._time(outputs)
        self._empty = 0 if outputs else self._empty + 1
        if self._empty >= STUCK_STEPS:
            raise RuntimeError(f"{STUCK_STEPS} steps in a row brought nothing: the engine is stuck")
        for output in outputs:
            self.ledger.take(output)
            self._minute.tokens += len(output.token_ids)
            plan = self.ledger.open.get(output.request_id)
            if plan is not None and plan.is_to_be_aborted:
                self._abort(plan)
        if time.perf_counter() - self._minute.began >= 60:
            self._say()

    def _time(self, outputs: Sequence[Output]) -> None:
        """Note a decode step: by the clock on a GPU, by CPU seconds on a CPU, where others compute too."""
        now = time.perf_counter() if self._on_gpu else time.process_time()
        before, self._prefilled = self._prefilled, prefill_counters(self.engine.stats())
        ms = self._cycles.observe(outputs, now, before != self._prefilled)
        self._cycles.samples.clear()
        if ms is None:
            return
        plans = [self.ledger.open.get(each.request_id) for each in outputs if each.token_ids]
        asked = [plan.request.params for plan in plans if plan is not None]
        context = statistics.fmean(each.prompt_tokens + each.completion_tokens for each in outputs)
        kind = (
            self.engine.spec,
            len(asked),
            any(params.grammar is not None for params in asked),
            any(params.logprobs is not None for params in asked),
            int(context).bit_length(),
        )
        self._steps.add(self._block, kind, ms)
        if len(self._minute.step_ms) < 10_000:
            self._minute.step_ms.append(ms)

    def _idle(self) -> None:
        """Nothing is open: pages must add up, and memory is what the engine holds for itself."""
        self._idle_points += 1
        try:
            self.engine.check_integrity()
            check_pages(self.engine.stats())
        except AssertionError as error:
            self.ledger.fault("integrity", f"after wave {self._waves}: {error}")
        self._resident.add(self._block, resident_bytes())
        if self._on_gpu:
            self._reserved.add(self._block, torch.cuda.memory_reserved())
        self._cycles.pause()
        if not self._is_over:
            time.sleep(self.rng.uniform(0.0, 0.2))

    def _say(self) -> None:
        """The progress line."""
        minute, now = self._minute, time.perf_counter()
        stats, counts = self.engine.stats(), self.ledger.counts
        self.rates.append(minute.tokens / (now - minute.began))
        step = f"{statistics.median(minute.step_ms):.1f} ms" if minute.step_ms else "-"
        reserved = f", CUDA {torch.cuda.memory_reserved() / 2**30:.2f} GiB" if self._on_gpu else ""
        print(
            f"{self._elapsed / 60:6.1f} min: {self._waves} waves, {counts['requests']} requests, "
            f"{counts['abort']} aborted, {len(self.ledger.open)} open; {self.rates[-1]:.0f} tokens/s, "
            f"step {step}; {stats['preemptions']:.0f} preemptions, {stats['cached_tokens']:.0f} cached; "
            f"resident {resident_bytes() / 2**20:.0f} MiB{reserved}; "
            f"{sum(self.ledger.faults.values())} faults",
            flush=True,
        )
        self._minute = Minute(now)

    def _replay(self) -> None:
        """Run a sample of the requests again, one at a time and without cached pages, and compare."""
        self.engine.set_spec(self._tree)
        for index, plan in enumerate(self.ledger.kept):
            if self.stop:
                return
            tokens: list[int] = []
            text = ""
            self.engine.add(plan.alone(f"alone-{index}"))
            while self.engine.has_work():
                for output in self.engine.step():
                    tokens += output.token_ids
                    text += output.text
            self._replayed += 1
            if (tokens, text) == (plan.tokens, plan.text):
                self._same_alone += 1
            elif not self._on_gpu:
                pairs = enumerate(zip(tokens, plan.tokens, strict=False))
                where = next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(plan.tokens)))
                text = f"{plan.request.request_id} ({plan.option}) differs alone, from token {where}"
                self.ledger.fault("replay", text)

    def verdicts(self) -> list[tuple[str, bool | None, str]]:
        """Each test: its name, whether it held (None: nothing can be said), and what was found."""
        faults, counts = self.ledger.faults, self.ledger.counts
        lost = len(self.ledger.open)
        steps, resident, reserved = self._steps.change(), self._resident.growth(), self._reserved.growth()
        few = "the run was too short for this test"
        tests: list[tuple[str, bool | None, str]] = [
            (
                "endings",
                not faults["ending"] and not lost,
                f"{counts['requests']} requests, {lost} not ended, {faults['ending']} ended wrongly or twice",
            ),
            (
                "outputs",
                not (faults["tokens"] or faults["grammar"]),
                f"{faults['tokens']} with wrong counts, {faults['grammar']} against their grammar",
            ),
            (
                "errors",
                not (faults["error"] or faults["engine"] or faults["refused"]),
                f"{faults['error']} errors, {faults['engine']} failures of the engine; {counts['refused']} "
                f"bad ones refused, {faults['refused']} refused or taken wrongly",
            ),
            (
                "integrity",
                not faults["integrity"],
                f"free + cached = all pages at {self._idle_points} idle points",
            ),
            ("resident", resident and resident.is_flat, str(resident or few)),
            ("step time", steps and steps.is_noise, str(steps or few)),
        ]
        if self._on_gpu:
            tests.append(("reserved", reserved and reserved.is_flat, str(reserved or few)))
        if self._replayed:
            share = f"{self._same_alone} of {self._replayed} requests have the same text alone and uncached"
            tests.append(("alone", None if self._on_gpu else not faults["replay"], share))
        return tests

    def report(self) -> tuple[bool, dict[str, Any]]:
        """Print the verdicts; whether none is bad, and a JSON object."""
        stats, counts = self.engine.stats(), self.ledger.counts
        elapsed = min(self._elapsed, self._seconds)
        print(
            f"\n{elapsed / 60:.1f} minutes, {self._waves} waves: {counts['requests']} requests "
            f"({counts['stop']} stopped, {counts['length']} at their limit, {counts['abort']} aborted), "
            f"{stats['generated_tokens']:.0f} tokens, {stats['preemptions']:.0f} preemptions, "
            f"{stats['prompt_tokens']:.0f} prompt tokens computed and {stats['cached_tokens']:.0f} cached, "
            f"acceptance length {stats['accept_length']:.2f}"
        )
        if self.rates:
            print("tokens/s by minute: " + " ".join(f"{rate:.0f}" for rate in self.rates))
        tests = self.verdicts()
        for name, held, text in tests:
            print(f"  {'-' if held is None else 'ok' if held else 'BAD':4}{name:10} {text}")
        for text in self.ledger.named:
            print(f"  FAULT {text}")
        good = all(held is not False for _, held, _ in tests)
        print("interrupted; until then: " * self.stop + ("PASSED" if good else "FAILED"), flush=True)
        return good, {
            "kind": "soak",
            **environment(self.engine),
            "minutes": round(elapsed / 60, 2),
            "passed": good,
            "interrupted": self.stop,
            **{name: {"held": held, "found": text} for name, held, text in tests},
            "counts": dict(counts),
            "stats": self.engine.stats(),
            "tokens_per_s_by_minute": [round(rate, 1) for rate in self.rates],
        }


def check_pages(stats: dict[str, float]) -> None:
    """Raise `AssertionError` unless an idle engine's pages are all free or cached, and nothing runs."""
    assert stats["running"] == stats["waiting"] == 0, "requests run on an idle engine"
    assert stats["pages_used"] == 0, f"{stats['pages_used']:.0f} pages are held by nobody"
    together = stats["pages_free"] + stats["pages_cached"]
    assert together == stats["pages"], f"{together:.0f} of {stats['pages']:.0f} pages are free or cached"


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def stop_on_interrupt(soak: Soak) -> Iterator[None]:
    """The first Ctrl-C asks the run to end, the second one ends it."""

    def ask(_number: int, _frame: FrameType | None) -> None:
        if soak.stop:
            raise KeyboardInterrupt
        soak.stop = True
        logger.warning("interrupted: open requests are aborted, then comes the report")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 where a test fails, 2 with a sentence on a wrong flag."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    try:
        config = _config(args)
        engine = load_engine(args.model, config)
        if args.longest > engine.max_model_len:
            raise ConfigError(f"--longest {args.longest} is above --max-model-len, {engine.max_model_len}")
    except NextnError as error:
        print(f"bench.soak: {error}", file=sys.stderr)
        return 2
    soak = Soak(engine, config.max_running_requests, args)
    with stop_on_interrupt(soak):
        soak.run()
    good, result = soak.report()
    write_jsonl(args.jsonl, [result | {"model": args.model, "seed": args.seed, "longest": args.longest}])
    return 0 if good and not soak.stop else 130 if good else 1


def _config(args: argparse.Namespace) -> EngineConfig:
    """The flags', with a pool for a sixth of what all rows may become, unless one is asked for."""
    if args.minutes <= 0 or args.replay < 0 or args.longest < 64:
        raise ConfigError("--minutes must be above 0, --replay at least 0 and --longest at least 64")
    config = engine_config(args)
    if config.num_pages is not None:
        return config
    tokens = max(config.max_running_requests * args.longest // 6, args.longest + 4 * config.largest_tree)
    return replace(config, num_pages=math.ceil(tokens / config.page_size) + 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument(
        "--longest", type=int, default=1024, metavar="TOKENS", help="most tokens of a request (default 1024)"
    )
    parser.add_argument(
        "--replay", type=int, default=24, help="requests replayed alone at the end (default 24)"
    )
    parser.add_argument("--jsonl", type=Path, help="write the result here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
