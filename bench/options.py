"""What sampling options add to a decode step, on one model: `python -m bench.options MODEL`.

Each batch runs the same shape greedily, then with temperature, with every option that changes which token is
chosen, and with log-probabilities too. Before a batch is timed, captured steps must bring the tokens of steps
launched op by op, with every option on; else it has no figures and the exit status is 1. Acceptance is
simulated, so that all rows of a table do the same work; `--no-simulate` is for weights that are not random.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cycles import ACCEPT_LENGTH, captured_steps_agree
from bench.jsonl import write_jsonl
from nextn.engine.bench import (
    BatchRun,
    check_rows,
    environment,
    random_prompts,
    simulated_lengths,
    spare_tokens,
)
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.llm import resolve_model
from nextn.errors import NextnError

CYCLES = 60
EVERYTHING: dict[str, Any] = {
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": tuple((token, 1.5) for token in range(40)),
    "min_tokens": 64,
}
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (0.0, {}),
    "temperature": (0.8, {}),
    "filters": (0.8, {name: EVERYTHING[name] for name in ("top_k", "top_p", "min_p")}),
    "every option": (0.8, EVERYTHING),
    "every option, 20 logprobs": (0.8, {**EVERYTHING, "logprobs": 20}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when the check fails, 2 with a sentence on a wrong flag."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(argv)
    try:
        config = engine_config(args)
        check_rows(max(args.batch_size), config.max_running_requests)
        engine = Engine.from_config(resolve_model(args.model), config)
        results = write_jsonl(args.jsonl, run_batches(engine, args))
    except NextnError as error:
        print(f"bench.options: {error}", file=sys.stderr)
        return 2
    return int(len(results) < len(args.batch_size) * len(CASES))


def run_batches(engine: Engine, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every case of every batch, as far as captured steps bring what single launches bring."""
    temperature, options = CASES["every option, 20 logprobs"]
    for batch in args.batch_size:
        if not captured_steps_agree(engine, batch, [engine.spec], temperature, **options):
            return
        yield from _measure(engine, batch, args)


def _measure(engine: Engine, batch: int, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every case of one batch; the first, greedy, is what the others are compared with."""
    spec, base = engine.spec, 0.0
    for name, (temperature, options) in CASES.items():
        room = 4 * CYCLES * (spec.width if spec else 1) + spare_tokens(spec)
        prompts = random_prompts(engine, args.context, batch, args.seed)
        run = BatchRun(engine, prompts, room, temperature, **options)
        lengths = simulated_lengths(ACCEPT_LENGTH, args.seed) if spec and args.simulate else None
        step_ms = statistics.median(run.measure(spec, CYCLES, lengths).cycle_ms)
        run.close()
        base = base or step_ms
        print(f"bs {batch:3} {name:28} {step_ms:8.3f} ms  {100 * (step_ms / base - 1):+6.2f} %", flush=True)
        yield {
            "case": name,
            **environment(engine),
            "batch_size": batch,
            "context": args.context,
            "spec": str(spec or "plain"),
            "vocab": engine.worker.models.cfg.vocab_size,
            "step_ms": round(step_ms, 3),
            "added_percent": round(100 * (step_ms / base - 1), 2),
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.options", description=__doc__.split("\n", 1)[0])
    add_engine_flags(parser)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument(
        "--simulate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="set the accepted length instead of finding it, for random weights",
    )
    parser.add_argument("--jsonl", type=Path, help="write the results there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
