"""A server around a scripted engine in a process of its own, for tests of signals, hangs and failures.

Its only argument is a JSON object of options; it prints the port that it listens on before anything else.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nextn.config import EngineConfig
from nextn.engine.request import Output, SamplingParams
from nextn.errors import ConfigError
from nextn.server import process, watchdog
from nextn.server.metrics import Metrics
from tests.server.fake import FakeEngine


class Scripted(FakeEngine):
    """Answers that go on until the file `gate` exists; `hang` says what never returns."""

    gate: Path | None = None
    hang: str = ""

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        super().check(prompt_tokens, params)
        if self.hang == "prepare":
            hang_here()

    def step(self) -> list[Output]:
        if self.gate is not None and self.gate.exists():
            for opened in self._open.values():
                del opened.tokens[len(opened.request.output_tokens) :]
        if self.steps >= 3 and self.hang == "step":
            hang_here()
        if self.steps >= 3 and self.hang == "lock":
            ctypes.PyDLL(None).sleep(10_000)  # with the interpreter's lock, which nobody else gets
        return super().step()


def hang_here() -> None:
    """Say so, and never return."""
    print("hanging", file=sys.stderr, flush=True)
    while True:
        time.sleep(1000)


def load(options: dict[str, Any]) -> Scripted:
    """The engine, or what the options want to happen instead."""
    match options.get("load"):
        case "hang":
            hang_here()
        case "error":
            raise ConfigError("the checkpoint is a sandwich")
        case "defect":
            raise RuntimeError("the weights are on fire")
    fail_at = options.get("fail_at")
    engine = Scripted(None, lambda _: [40] * 10**6, max_model_len=10**7, fail_at=fail_at)
    engine.step_seconds = options.get("step_seconds", 0.005)
    engine.gate = Path(options["gate"]) if "gate" in options else None
    engine.hang = options.get("hang", "")
    return engine


def _failing(record: Callable[..., None], at: int) -> Callable[..., None]:
    """Raises once, at that call."""
    calls = itertools.count(1)

    def fails(*arguments: Any) -> None:
        if next(calls) == at:
            raise ZeroDivisionError("a defect in counting")
        record(*arguments)

    return fails


def main() -> None:
    """Serve as nextn-serve does."""
    options = json.loads(sys.argv[1])
    logging.basicConfig(level="INFO")
    process.END_SECONDS = watchdog.END_SECONDS = options.get("end", 30.0)
    process._WRITING_SECONDS = options.get("writing", 5.0)
    if "record_fails_at" in options:
        Metrics.record = _failing(Metrics.record, options["record_fails_at"])  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: hang_here())  # the main thread, and so the event loop
    with process.bound("127.0.0.1", 0) as sockets:
        print(sockets[0].getsockname()[1], flush=True)
        process.serve(
            lambda: load(options),
            EngineConfig(),
            ["fake"],
            sockets=sockets,
            api_key=None,
            log_level="info",
            ready=lambda _: "ready at {url}",
            about=lambda _: {"spec": "off", "dtype": "float32"},
            shutdown_timeout=options.get("shutdown_timeout", 60.0),
            step_timeout=options.get("step_timeout", 0.0),
        )


if __name__ == "__main__":
    main()
