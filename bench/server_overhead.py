"""What the server adds to an engine: microseconds a request and a streamed chunk, and what it takes of steps.

    OMP_NUM_THREADS=1 python bench/server_overhead.py

The engine is a scripted one that computes nothing. The whole application is called over ASGI, in this process
and without sockets; what is counted is the CPU time of all threads without that of the engine's own steps.
A request's cost is that of one for a single step; a chunk's is the difference to a long stream, by the number
of its chunks. Both are the best of several rounds. The last part paces the engine like a real one (steps of
8 ms) and compares the time from one step to the next without a server and with streams that are read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nextn.demo import path as demo_path
from nextn.engine.request import Output, Request, SamplingParams, TokenLogprobs
from nextn.engine.stats import StepReport
from nextn.server.app import create_app
from nextn.server.bridge import Bridge
from nextn.text import Detokenizer, Tokenizer

CHAT = {"messages": [{"role": "user", "content": "What is 12 + 5 * 3?"}]}
TOP = tuple((token, -float(token)) for token in range(20))


class ScriptedEngine:
    """Gives every open request `run` tokens a step until its limit; a step takes `step_seconds`, asleep."""

    max_model_len = 1_000_000
    grammars = None

    def __init__(self, tokenizer: Tokenizer, run: int, step_seconds: float = 0.0) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.words = tokenizer.encode(
            "The quick brown fox jumps over the lazy dog. ", add_special_tokens=False
        )
        self.run = run
        self.step_seconds = step_seconds
        self.open: dict[str, tuple[Request, Detokenizer]] = {}
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self.on_start: Callable[[str], None] = lambda request_id: None
        self.begun: list[float] = []
        self.spent = 0.0

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        """Everything can be served."""

    def check_integrity(self) -> None:
        """There are no pages."""

    def add(self, request: Request) -> None:
        assert self.tokenizer is not None
        self.open[request.request_id] = request, Detokenizer(self.tokenizer, request.params.stop)
        self.on_start(request.request_id)

    def abort(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Output]:
        self.begun.append(time.perf_counter())
        before = time.thread_time()
        time.sleep(self.step_seconds)
        outputs = [self._advance(request, detokenizer) for request, detokenizer in list(self.open.values())]
        self.spent += time.thread_time() - before
        tokens = sum(len(output.token_ids) for output in outputs)
        self.on_step(StepReport("decode", len(outputs), tokens, time.perf_counter() - self.begun[-1]))
        return outputs

    def stats(self) -> Mapping[str, float]:
        return {"running": float(len(self.open)), "waiting": 0.0, "pages": 100.0, "pages_used": 5.0}

    def close(self) -> None:
        self.open.clear()

    def _advance(self, request: Request, detokenizer: Detokenizer) -> Output:
        first, params = len(request.output_tokens), request.params
        count = min(self.run, params.max_tokens - first)
        tokens = tuple(self.words[(first + i) % len(self.words)] for i in range(count))
        request.output_tokens += tokens
        text = "".join(map(detokenizer.push, tokens))
        ended = len(request.output_tokens) >= params.max_tokens
        if ended:
            del self.open[request.request_id]
            text += detokenizer.flush()
        top = TOP[: params.logprobs or 0]
        return Output(
            request.request_id,
            text,
            tokens,
            len(request.prompt_tokens),
            len(request.output_tokens),
            finish_reason="length" if ended else None,
            logprobs=() if params.logprobs is None else tuple(TokenLogprobs(t, -1.0, top) for t in tokens),
        )


async def call(app: Any, body: Mapping[str, Any]) -> int:
    """POST a chat; the number of chunks that came."""
    content = json.dumps(body).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    pending = [{"type": "http.request", "body": content, "more_body": False}]
    pieces = 0

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal pieces
        assert message.get("status", 200) == 200, message
        pieces += bool(message.get("body"))

    await app(scope, receive, send)
    return pieces


async def cpu_seconds(
    app: Any, engine: ScriptedEngine, body: Mapping[str, Any], times: int, rounds: int
) -> tuple[float, int]:
    """CPU seconds of one call, the engine's left out, and its chunks; the best of the rounds."""
    best, chunks = float("inf"), 0
    for _ in range(rounds):
        before = time.process_time() - engine.spent
        for _ in range(times):
            chunks = await call(app, body)
        best = min(best, (time.process_time() - engine.spent - before) / times)
    return best, chunks


async def overhead(tokenizer: Tokenizer, rounds: int) -> list[dict[str, object]]:
    """Cost of a request and of a chunk, for what a body may ask for."""
    rows: list[dict[str, object]] = []
    plain = {"stream": True}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "plain, 1 token a step": (1, plain),
        "plain, 3 tokens a step": (3, plain),
        "stop strings, 3 tokens a step": (3, plain | {"stop": ["###", "END"]}),
        "logprobs, 3 tokens a step": (3, plain | {"logprobs": True}),
        "top_logprobs 20, 3 tokens a step": (3, plain | {"logprobs": True, "top_logprobs": 20}),
        "usage with every chunk, 3 tokens a step": (
            3,
            plain | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    }
    for name, (run, more) in cases.items():
        engine = ScriptedEngine(tokenizer, run)
        bridge = Bridge(engine, max_open=64)
        app = create_app(bridge, ["demo"])
        bridge.start()
        short, few = await cpu_seconds(app, engine, CHAT | more | {"max_tokens": run}, 50, rounds)
        long, many = await cpu_seconds(app, engine, CHAT | more | {"max_tokens": run * 500}, 1, rounds)
        await bridge.stop()
        chunk = (long - short) / (many - few)
        rows.append({"case": name, "request_us": round(1e6 * short), "chunk_us": round(1e6 * chunk, 1)})
    return rows


async def paced(tokenizer: Tokenizer, streams: int, step_seconds: float, steps: int) -> float:
    """Median milliseconds from one step to the next while that many streams are read."""
    engine = ScriptedEngine(tokenizer, 3, step_seconds)
    bridge = Bridge(engine, max_open=streams)
    app = create_app(bridge, ["demo"])
    bridge.start()
    body = CHAT | {"stream": True, "max_tokens": 3 * steps}
    await asyncio.gather(*(call(app, body) for _ in range(streams)))
    await bridge.stop()
    return _median_gap(engine)


def alone(tokenizer: Tokenizer, requests: int, step_seconds: float, steps: int) -> float:
    """The same for the engine's loop without any server."""
    engine = ScriptedEngine(tokenizer, 3, step_seconds)
    for index in range(requests):
        engine.add(Request(str(index), [1], SamplingParams(max_tokens=3 * steps)))
    while engine.has_work():
        engine.step()
    return _median_gap(engine)


def _median_gap(engine: ScriptedEngine) -> float:
    gaps = [b - a for a, b in zip(engine.begun, engine.begun[1:], strict=False)]
    return 1000 * statistics.median(gaps[len(gaps) // 4 :])


def main() -> None:
    """Print a line a case, and all of it as JSON last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the best counts (default: 5)")
    parser.add_argument("--step-ms", type=float, default=8.0, help="length of a paced step (default: 8)")
    args = parser.parse_args()
    tokenizer = Tokenizer(Path(demo_path()))
    rows = asyncio.run(overhead(tokenizer, args.rounds))
    for row in rows:
        print(f"{row['case']:<42} {row['request_us']:>7} us a request {row['chunk_us']:>8} us a chunk")
    paces = []
    for streams in (1, 16, 64):
        bare = alone(tokenizer, streams, args.step_ms / 1000, 200)
        served = asyncio.run(paced(tokenizer, streams, args.step_ms / 1000, 200))
        growth = 100 * (served / bare - 1)
        paces.append({"streams": streams, "bare_ms": round(bare, 3), "served_ms": round(served, 3)})
        print(f"{streams:>2} streams: {bare:.2f} ms a step alone, {served:.2f} ms served ({growth:+.1f} %)")
    print(json.dumps({"overhead": rows, "steps": paces}))


if __name__ == "__main__":
    main()
