"""The speed of decode steps on one model: every case of the target table, checked first, beside its target.

`python -m bench.cycles MODEL --load-format dummy [--match TEXT] [--jsonl FILE] [--baseline FILE]` loads the
model once. Before anything is timed, captured steps must bring the same tokens as steps launched op by op; if
they do not, no figure is printed and the exit status is 1. Acceptance is simulated: the weights are random.
Token modes: `fixed` writes one id for every accepted token, so rows share experts; `real` keeps the draft's.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.jsonl import write_jsonl
from nextn.config import SpecConfig
from nextn.engine.bench import (
    FIXED_TOKEN,
    WARMUP_CYCLES,
    BatchRun,
    distinct_experts,
    environment,
    random_prompts,
    simulated_lengths,
    spare_tokens,
)
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.llm import resolve_model
from nextn.errors import NextnError

logger = logging.getLogger(__name__)

ACCEPT_LENGTH = 2.5
CHECKED_CYCLES = 6
FIXED_WARMUP = 60
"""Steps before figures with fixed tokens: until then rows still differ by their last real tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; the targets are in ms a step on one H200."""

    context: int
    batch: int
    spec: str  # "2/4/4", or "plain"
    tokens: str  # "real" or "fixed"
    must: float | None = None
    goal: float | None = None

    @property
    def name(self) -> str:
        """What the row is called; also its key in a baseline."""
        return f"{self.spec} bs {self.batch} ctx {self.context} {self.tokens}"


CASES = (
    Case(1024, 1, "plain", "real", 6.0, 3.8),
    Case(1024, 1, "2/4/4", "real", 7.8, 5.0),
    Case(1024, 1, "3/1/4", "real", 7.8, 5.0),
    Case(1024, 8, "2/4/4", "fixed", 11.2, 8.0),
    Case(1024, 8, "2/4/4", "real"),
    Case(1024, 8, "3/1/4", "fixed"),
    Case(12288, 1, "plain", "real"),
    Case(12288, 1, "2/4/4", "real", 8.8, 5.5),
    Case(12288, 1, "3/1/4", "real"),
    Case(12288, 16, "plain", "real", 20.2, 14.0),
    Case(12288, 16, "plain", "fixed"),
    Case(12288, 16, "2/4/4", "fixed", 23.7, 17.0),
    Case(12288, 16, "2/4/4", "real"),
    Case(12288, 16, "3/1/4", "fixed"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when the check fails, 2 with a sentence on a wrong flag."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    cases = [case for case in CASES if args.match in case.name]
    try:
        engine = _engine(args, cases)
        results = write_jsonl(args.jsonl, run_cases(engine, cases, args))
    except NextnError as error:
        print(f"bench.cycles: {error}", file=sys.stderr)
        return 2
    if not results:
        return 1
    baseline = _read_baseline(args.baseline) if args.baseline else {}
    by_name = {str(result["case"]): result for result in results}
    for case in cases:
        print(line(case, by_name[case.name], baseline.get(case.name)))
    return 0


def run_cases(engine: Engine, cases: Sequence[Case], args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measure every case; none when captured and plain launches disagree, because no figure counts then."""
    specs = {None if case.spec == "plain" else SpecConfig.parse(case.spec) for case in cases}
    if not all(captured_steps_agree(engine, batch, specs) for batch in sorted({c.batch for c in cases})):
        return
    for context, batch in sorted({(case.context, case.batch) for case in cases}):
        group = [case for case in cases if (case.context, case.batch) == (context, batch)]
        started = time.perf_counter()
        longest = SpecConfig(3, 1, 4)
        room = (args.output_len + FIXED_WARMUP * longest.width + 2 * spare_tokens(longest)) * len(group)
        run = BatchRun(engine, random_prompts(engine, context, batch, args.seed), room, 0.0)
        logger.info("ctx %d, batch %d: prefilled in %.1f s", context, batch, time.perf_counter() - started)
        for case in group:
            result = measure(engine, run, case, args)
            print(line(case, result, None), file=sys.stderr, flush=True)
            yield result
        run.close()


def captured_steps_agree(
    engine: Engine,
    batch: int,
    specs: Iterable[SpecConfig | None],
    temperature: float = 0.0,
    **options: Any,
) -> bool:
    """Whether a few cycles of each shape bring the same tokens as graphs and launched op by op.

    options: further fields of `SamplingParams`. Says so where they do not.
    """
    if not engine.worker.runs_ahead:
        return True
    for spec in specs:
        brought = []
        for eager in (False, True):
            run = BatchRun(engine, random_prompts(engine, 256, batch, seed=1), 64, temperature, **options)
            brought.append([run.step(spec, eager=eager) for _ in range(CHECKED_CYCLES)])
            run.close()
        if brought[0] != brought[1]:
            print(
                f"captured steps and single launches disagree ({spec or 'plain'}, batch {batch}): no figures"
            )
            return False
    return True


def measure(engine: Engine, run: BatchRun, case: Case, args: argparse.Namespace) -> dict[str, object]:
    """One case on rows that stand at its context."""
    spec = None if case.spec == "plain" else SpecConfig.parse(case.spec)
    fixed = min(FIXED_TOKEN, engine.worker.models.cfg.vocab_size - 1) if case.tokens == "fixed" else None
    if spec is None:
        lengths = simulated_lengths(1.0, args.seed) if fixed is not None else None
    else:
        lengths = simulated_lengths(ACCEPT_LENGTH, args.seed)
    warmup = WARMUP_CYCLES if fixed is None else FIXED_WARMUP
    measured = run.measure(spec, args.output_len, lengths, fixed, warmup)
    phases = run.phases(spec, lengths, fixed)
    return {
        "case": case.name,
        **environment(engine),
        "batch_size": case.batch,
        "context": case.context,
        "spec": case.spec,
        "token_mode": case.tokens,
        "accept_mode": "simulated" if lengths else "real",
        "accept_length": round(measured.acceptance.length, 3),
        "step_ms": round(statistics.median(measured.cycle_ms), 3),
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "distinct_experts": round(distinct_experts(run, spec, lengths, fixed), 1),
        **{f"{phase}_ms": round(ms, 3) for phase, ms in phases.items()},
        "must_ms": case.must,
        "goal_ms": case.goal,
    }


def line(case: Case, result: dict[str, object], baseline: dict[str, object] | None) -> str:
    """One row of the report."""
    phases = " ".join(
        f"{name} {result[f'{name}_ms']}"
        for name in ("draft", "verify", "accept", "extend")
        if f"{name}_ms" in result
    )
    step = float(str(result["step_ms"]))
    verdict = "" if case.must is None else ("ok" if step < case.must else "MISSED")
    old = f" was {baseline['step_ms']}" if baseline else ""
    return (
        f"{case.name:28} {step:8.3f} ms{old} {verdict:6} must {case.must or '-'} goal {case.goal or '-'} | "
        f"{result['tokens_per_s']} tok/s accept {result['accept_length']} "
        f"experts {result['distinct_experts']} | {phases}"
    )


def _engine(args: argparse.Namespace, cases: Sequence[Case]) -> Engine:
    """The engine, with rows for the largest batch at least."""
    if not cases:
        raise NextnError(
            f"no case's name holds {args.match!r}; the cases: {', '.join(c.name for c in CASES)}"
        )
    config = engine_config(args)
    started = time.perf_counter()
    config = replace(config, max_running_requests=max(config.max_running_requests, *(c.batch for c in cases)))
    engine = Engine.from_config(resolve_model(args.model), config)
    tokens = engine.pool.num_pages * engine.pool.page_size
    seconds = time.perf_counter() - started
    print(f"ready after {seconds:.1f} s; cache {tokens} tokens; {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    return engine


def _read_baseline(path: Path) -> dict[str, dict[str, object]]:
    """Results of an earlier run by case."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {str(each["case"]): each for each in lines}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.cycles", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    parser.add_argument("--match", default="", help="only cases whose name holds this text")
    parser.add_argument("--output-len", type=int, default=96, help="tokens a request and case (default 96)")
    parser.add_argument("--jsonl", type=Path, help="write the results here, one JSON object a line")
    parser.add_argument(
        "--baseline", type=Path, help="results of an earlier run to print beside the new ones"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
