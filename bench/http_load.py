"""The same load on a running OpenAI server, through the standard library: a thread a request, streamed."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bench.load import Job, Point, Record
from nextn.errors import ConfigError

TIMEOUT_S = 600.0
MAX_OPEN = 1024
_SAMPLE = re.compile(r"^(nextn_\w+)(?:\{\})? ([0-9.eE+-]+)$", re.MULTILINE)


class Server:
    """A server at `url`, such as http://127.0.0.1:8000, and the first model that it names."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url: SplitResult = urlsplit(url if "//" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ConfigError(f"--url {url!r} is not an address such as http://127.0.0.1:8000")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            self.model = str(json.loads(self._get("/v1/models"))["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--url {url} does not list a model: {error}") from None

    def run(self, jobs: Sequence[Job], point: Point, temperature: float, seed: int) -> Load:
        """Send all jobs as the point says; returns when the last one has ended."""
        load = Load(self, temperature)
        load.run(jobs, point, seed)
        return load

    def metrics(self) -> dict[str, float]:
        """Figures of nextn's own metrics without labels; none where the server has no such page."""
        try:
            text = self._get("/metrics").decode()
        except (OSError, http.client.HTTPException):
            return {}
        return {name: float(value) for name, value in _SAMPLE.findall(text)}

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST a completion and give each event as it comes; raises `OSError` with what a refusal says."""
        connection = self._connect()
        try:
            connection.request(
                "POST", f"{self._url.path.rstrip('/')}/v1/completions", json.dumps(body), self._headers
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
            for line in answer:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    yield json.loads(text.removeprefix("data:"))
            raise OSError("the stream ended without [DONE]")
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._url.hostname), self._url.port, timeout=TIMEOUT_S)

    def _get(self, path: str) -> bytes:
        address = self._url._replace(path=self._url.path.rstrip("/") + path).geturl()
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=self._headers), timeout=TIMEOUT_S
        ) as answer:
            return bytes(answer.read())


class Load:
    """Requests under way to a server, and their records; `done` counts those that have ended."""

    def __init__(self, server: Server, temperature: float) -> None:
        self.records: list[Record] = []
        self.done = 0
        self.seconds = 0.0
        self._server, self._temperature = server, temperature
        # Other servers may refuse a field that is nextn's own.
        self._more = {"include_speculation": True} if server.metrics() else {}
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job], point: Point, seed: int) -> None:
        """Closed loop: as many threads as requests may be open. By a clock: a thread as each one is due."""
        started = time.perf_counter()
        sent = []
        with ThreadPoolExecutor(min(point.concurrency or MAX_OPEN, len(jobs))) as pool:
            for job, offset in zip(jobs, point.arrivals(len(jobs), seed), strict=True):
                due = started + offset
                time.sleep(max(0.0, due - time.perf_counter()))
                sent.append(pool.submit(self._send, job, None if point.concurrency else due))
        self.seconds = time.perf_counter() - started
        for each in sent:
            each.result()  # raises what nobody foresaw

    def _send(self, job: Job, due: float | None) -> None:
        record = Record(time.perf_counter() if due is None else due, len(job.prompt))
        body = {
            "model": self._server.model,
            "prompt": job.prompt,
            "max_tokens": job.output_len,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        try:
            for event in self._server.stream(body):
                take(record, event, time.perf_counter())
        except (OSError, http.client.HTTPException, ValueError) as error:
            record.failed = str(error) or repr(error)
        except (LookupError, TypeError, AttributeError) as error:
            record.failed = f"an event of the stream is not a completion's: {error!r}"
        finally:
            record.ended = True
            with self._lock:
                self.records.append(record)
                self.done += 1


def take(record: Record, event: dict[str, Any], now: float) -> None:
    """Note one event of a stream: text is a delivery, the usage at the end gives the number of tokens."""
    if "error" in event:
        raise OSError(str(event["error"]))
    usage = event.get("usage")
    if any(choice.get("text") for choice in event.get("choices", ())) or (usage and not record.times):
        record.times.append(now)
        record.tokens += 1  # until the usage says better
    if usage:
        record.tokens = int(usage["completion_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        speculation = usage.get("speculation") or {}
        record.cycles = int(speculation.get("cycles", 0))
        record.emitted = record.cycles + int(speculation.get("accepted_tokens", 0))
