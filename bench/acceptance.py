"""Acceptance of the draft on real text: tokens a cycle by tree shape, with outputs that loop left out.

A looping output is easy to draft and inflates every figure, so it is counted and excluded. The last line is
JSON: shape -> accept_length, first_accept_rate, by_depth (share of cycles that accepted at least d draft
tokens), and what they were taken over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nextn import LLM, SamplingParams
from nextn.config import SpecConfig
from nextn.engine.llm import Completion
from nextn.engine.stats import Acceptance
from nextn.errors import ConfigError, NextnError

MAX_PERIOD = 40
MIN_DISTINCT = 0.5


def distinct_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1 when there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in three repeats of at most 40 tokens, or is half repetition as a whole."""
    for period in range(1, MAX_PERIOD + 1):
        tail = tokens[-3 * period :]
        if len(tail) == 3 * period and tail[period:] == tail[:-period]:
            return True
    return distinct_ratio(tokens) < MIN_DISTINCT


def read_prompts(path: Path, llm: LLM, limit: int | None) -> list[list[int]]:
    """Token ids of each line's 'prompt' (text), 'messages' (a chat) or first of 'turns'."""
    prompts = []
    tokenizer = llm.tokenizer
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        entry: dict[str, Any] = json.loads(line)
        if "messages" in entry:
            prompts.append(tokenizer.render_chat(entry["messages"]))
        elif "turns" in entry:
            prompts.append(tokenizer.render_chat([{"role": "user", "content": entry["turns"][0]}]))
        elif "prompt" in entry:
            prompts.append(tokenizer.encode(entry["prompt"]))
        else:
            raise ConfigError(f"{path}: a line has neither 'prompt' nor 'messages' nor 'turns'")
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def summarise(completions: Sequence[Completion], seconds: float) -> dict[str, Any]:
    """Acceptance over the outputs that do not loop."""
    kept = [completion for completion in completions if not loops(completion.token_ids)]
    total = Acceptance()
    for completion in kept:
        total.merge(completion.acceptance)
    depths = total.by_depth()
    ratios = [distinct_ratio(completion.token_ids) for completion in kept]
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "accept_length": round(total.length, 4),
        "first_accept_rate": round(depths[0], 4) if depths else 0.0,
        "by_depth": [round(share, 4) for share in depths],
        "outputs": len(kept),
        "looping": len(completions) - len(kept),
        "tokens": sum(len(completion.token_ids) for completion in kept),
        "distinct_4grams_median": round(statistics.median(ratios), 4) if ratios else 0.0,
        "tokens_per_s": round(tokens / seconds, 1),
    }


def measure(llm: LLM, prompts: list[list[int]], spec: SpecConfig, params: SamplingParams) -> dict[str, Any]:
    """Generate from every prompt with one shape; prompt i has seed `params.seed` + i, whatever the shape."""
    llm.engine.set_spec(spec)
    seeded = [
        SamplingParams(
            max_tokens=params.max_tokens, temperature=params.temperature, seed=(params.seed or 0) + i
        )
        for i in range(len(prompts))
    ]
    started = time.perf_counter()
    completions = llm.generate(prompts, seeded)
    return summarise(completions, time.perf_counter() - started)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a checkpoint directory, or 'demo'")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts, messages or turns")
    parser.add_argument("--shapes", default="2/4/4,3/1/4", help="steps/topk/draft-tokens, comma-separated")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=int, help="use only the first N prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8, help="requests that run at once (default 8)")
    parser.add_argument(
        "--no-coupled-drafting", action="store_true", help="rank children by probability alone"
    )
    parser.add_argument("--draft-hidden", choices=("post-norm", "pre-norm"), default="post-norm")
    parser.add_argument("--draft-model", help="take the NextN layer from this directory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape over the same prompts; exit status 2 with a sentence on a wrong argument."""
    args = _parser().parse_args(argv)
    try:
        shapes = [SpecConfig.parse(text) for text in args.shapes.split(",")]
        if not args.prompts.is_file():
            raise ConfigError(f"--prompts {args.prompts} is not a file")
        llm = LLM(
            args.model,
            device=args.device,
            dtype=args.dtype,
            spec=shapes[0],
            max_draft_tokens=max(shape.draft_tokens for shape in shapes),
            max_running_requests=args.batch_size,
            coupled_drafting=not args.no_coupled_drafting,
            draft_hidden=args.draft_hidden,
            draft_model=args.draft_model,
        )
        prompts = read_prompts(args.prompts, llm, args.limit)
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        results = {}
        for shape in shapes:
            results[str(shape)] = measure(llm, prompts, shape, params)
            print(f"{shape}: {results[str(shape)]}", file=sys.stderr, flush=True)
    except (NextnError, json.JSONDecodeError, UnicodeDecodeError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
