"""What structured output costs: the host's masks a cycle, and decode steps with and without grammars.

`python -m bench.grammar MODEL --load-format dummy [--rows 8] [--no-steps]` prints one table for each. Every
node of every tree is one that the grammar allows, so no mask is spared. Where there is no tokenizer, or with
`--vocab`, the vocabulary is made up: all bytes and random words.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.bench import random_prompts
from nextn.engine.engine import Engine
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.engine.grammar import Grammar, Grammars, Matcher, Vocabulary, mask_words, run_together
from nextn.engine.llm import resolve_model
from nextn.engine.request import Request, SamplingParams
from nextn.errors import NextnError
from nextn.text import Tokenizer

WARMUP = 5


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    form = {"type": "object", "properties": properties, "required": list(properties)}
    return form | {"additionalProperties": False}


def endless(items: dict[str, Any]) -> Grammar:
    """A list that is longer than any run."""
    return Grammar("json_schema", json.dumps({"type": "array", "items": items, "minItems": 100_000}))


SHORT = {"type": "string", "maxLength": 20}
NUMBER, FLAG, KIND = {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b"]}
PERSON = closed({"name": SHORT, "tags": {"type": "array", "items": SHORT, "maxItems": 3}})
GRAMMARS = {
    "any JSON object": Grammar("json"),
    "numbers": endless(NUMBER),
    "records": endless(closed({"id": NUMBER, "kind": KIND, "ok": FLAG})),
    "free strings": endless({"type": "string"}),
    "strings of 20": endless(SHORT),
    "records with strings": endless(PERSON),
    "words": Grammar("regex", "([a-z]{1,12} ){100,}"),
}  # fmt: skip
STEPS_WITH = ("numbers", "records", "records with strings", "words")


def made_up_vocabulary(size: int, eos: frozenset[int]) -> Vocabulary:
    """All bytes, JSON's punctuation in pairs, and random words of 2 to 12 letters, half behind a space."""
    draw = random.Random(0)
    words = dict.fromkeys(bytes([byte]) for byte in range(256))
    words |= dict.fromkeys(b'":|","|{"|"}|": |, "|["|"]|}}|],|:{|[{'.split(b"|"))
    letters = b"eeeetttaaooiinnsshhrrddllucmwfgypbvk0123456789"
    while len(words) < size:
        word = bytes(draw.choices(letters, k=draw.randint(2, 12)))
        words[word if draw.random() < 0.5 else b" " + word] = None
    spelt = iter(words)
    tokens = tuple(b"" if token in eos else next(spelt) for token in range(size))
    numbers = {word: token for token, word in enumerate(tokens) if word}

    def encode(text: str) -> list[int]:
        rest, found = text.encode(), []
        while rest:
            length = next(n for n in range(min(len(rest), 13), 0, -1) if rest[:n] in numbers)
            found.append(numbers[rest[:length]])
            rest = rest[length:]
        return found

    return Vocabulary(tokens, eos, encode)


def allowed(mask: torch.Tensor, eos: frozenset[int]) -> list[int]:
    """Tokens of one mask [words] without EOS."""
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return [token for token in np.flatnonzero(bits).tolist() if token not in eos]


class Walk:
    """One row: a matcher that goes along a random text of its grammar, with a tree in front of it."""

    def __init__(
        self, grammars: Grammars, grammar: Grammar, eos: frozenset[int], nodes: int, seed: int
    ) -> None:
        self.matcher: Matcher = grammars.compile(grammar).matcher()
        self.said: list[int] = []
        self.parents = [-1, *((node - 1) // 2 for node in range(1, nodes))]
        self.tokens = [0] * nodes
        self._eos, self._draw = eos, random.Random(seed)

    def plan(self, words: int) -> None:
        """Draw a tree of allowed tokens; siblings may be equal, which costs the same."""
        out = torch.zeros(len(self.tokens), words, dtype=torch.int32)
        for node in range(1, len(self.tokens)):
            self.matcher.fill(self.tokens[:node], self.parents[:node], out[:node])
            choices = allowed(out[self.parents[node]], self._eos)
            self.tokens[node] = self._draw.choice(choices) if choices else 0

    def advance(self) -> None:
        """Say the first drafted token."""
        self.said.append(self.tokens[1])
        self.matcher.advance(self.said)


def host_table(vocabulary: Vocabulary, rows: int, nodes: int, cycles: int) -> None:
    """Compile time and the masks of one cycle, each grammar with a vocabulary that is ready."""
    grammars, words = Grammars(lambda: vocabulary), mask_words(len(vocabulary.tokens))
    started = time.perf_counter()
    grammars.compile(Grammar("regex", "a"))
    print(f"vocabulary of {len(vocabulary.tokens)} ready in {(time.perf_counter() - started) * 1e3:.0f} ms")
    head = f"host, {rows} rows x {nodes} nodes"
    print(f"{head:28} {'compile':>10} {'a cycle':>10} {'95 %':>10} {'a mask':>10}")
    out = torch.empty(rows, nodes, words, dtype=torch.int32)
    for name, grammar in GRAMMARS.items():
        started = time.perf_counter()
        grammars.compile(grammar)
        compiled = time.perf_counter() - started
        walks = [Walk(grammars, grammar, vocabulary.eos, nodes, seed) for seed in range(rows)]
        spent = []
        for _ in range(cycles):
            for walk in walks:
                walk.plan(words)
            started = time.perf_counter()
            run_together(
                [
                    partial(walk.matcher.fill, walk.tokens, walk.parents, masks)
                    for walk, masks in zip(walks, out, strict=True)
                ]
            )
            spent.append(time.perf_counter() - started)
            for walk in walks:
                walk.advance()
        mean, late = statistics.fmean(spent), sorted(spent)[int(len(spent) * 0.95)]
        print(
            f"{name:28} {compiled * 1e3:7.1f} ms {mean * 1e6:7.0f} us {late * 1e6:7.0f} us "
            f"{mean / rows / nodes * 1e6:7.1f} us"
        )


def step_table(engine: Engine, rows: int, steps: int, spec: SpecConfig | None) -> None:
    """Median wall-clock milliseconds of a step of `rows` running requests, with grammars and without."""
    engine.set_spec(spec)
    print(f"step, {rows} rows, {spec or 'plain'}")
    base = 0.0
    for name in (None, *STEPS_WITH):
        grammar = GRAMMARS[name] if name else None
        step_ms, masks_ms = measure_steps(engine, grammar, rows, steps)
        base = base or step_ms
        print(
            f"{name or 'no grammar':28} {step_ms:7.3f} ms {step_ms / base - 1:+7.1%} masks {masks_ms:7.3f} ms"
        )


def measure_steps(engine: Engine, grammar: Grammar | None, rows: int, steps: int) -> tuple[float, float]:
    """Medians of a step and of the host's masks in it, in ms."""
    worker, masks = engine.worker, [0.0]
    make = worker._node_masks

    def timed(*args: Any) -> torch.Tensor:
        started = time.perf_counter()
        made = make(*args)
        masks.append(time.perf_counter() - started)
        return made

    room = (steps + WARMUP + 4) * (engine.spec.width if engine.spec else 1)
    for row, prompt in enumerate(random_prompts(engine, 64, rows, seed=1)):
        params = SamplingParams(room, temperature=1.0, seed=row, grammar=grammar, ignore_eos=grammar is None)
        engine.add(Request(str(row), prompt, params))
    spent: list[float] = []
    worker._node_masks = timed  # type: ignore[method-assign, assignment]
    try:
        while len(spent) < steps + WARMUP:
            started = time.perf_counter()
            ended = [output for output in engine.step() if output.finish_reason is not None]
            if ended:
                raise NextnError(f"a request ended early: {ended[0].finish_reason} {ended[0].error or ''}")
            if all(entry.is_prefilled for entry in engine.scheduler.running) and not engine.scheduler.waiting:
                spent.append(time.perf_counter() - started)
    finally:
        worker._node_masks = make  # type: ignore[method-assign]
        engine.close()
    return statistics.median(spent[WARMUP:]) * 1e3, statistics.median(masks[-steps:]) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 with a sentence on a wrong flag."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="bench.grammar", description=__doc__.split("\n\n")[0])
    add_engine_flags(parser)
    parser.add_argument("--rows", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--steps", type=int, default=60, help="steps and cycles to measure (default 60)")
    parser.add_argument("--vocab", type=int, help="measure the host with a made-up vocabulary of this size")
    parser.add_argument("--no-steps", action="store_true", help="the host alone; no weights are loaded")
    args = parser.parse_args(argv)
    try:
        _run(args, engine_config(args))
    except NextnError as error:
        print(f"bench.grammar: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace, config: EngineConfig) -> None:
    model = resolve_model(args.model)
    cfg = ModelConfig.from_dir(model)
    eos = frozenset(cfg.eos_token_ids) or frozenset({0})
    if args.vocab or config.load_format == "dummy":
        vocabulary = made_up_vocabulary(args.vocab or cfg.vocab_size, eos)
    else:
        vocabulary = Vocabulary.of(Tokenizer(model), cfg.vocab_size, eos)
    host_table(vocabulary, args.rows, config.spec.draft_tokens if config.spec else 1, args.steps)
    if args.no_steps:
        return
    engine = Engine.from_config(model, replace(config, max_running_requests=args.rows))
    if engine.grammars is None:
        engine.grammars, engine.eos_token_ids = Grammars(lambda: vocabulary), eos
    for spec in (config.spec, None) if config.spec else (None,):
        step_table(engine, args.rows, args.steps, spec)


if __name__ == "__main__":
    sys.exit(main())
