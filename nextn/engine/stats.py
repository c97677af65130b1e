"""Counters of a running engine: what the log line, the benchmark and the tests read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Acceptance:
    """Speculative cycles of one request, or of all.

    emitted: tokens that the cycles brought, bonus included. drafted: draft tokens verified.
    by_length[i]: cycles that emitted i tokens.
    """

    cycles: int = 0
    emitted: int = 0
    drafted: int = 0
    by_length: dict[int, int] = field(default_factory=dict)

    def record(self, emitted: int, drafted: int) -> None:
        """Count one cycle of one row."""
        self.cycles += 1
        self.emitted += emitted
        self.drafted += drafted
        self.by_length[emitted] = self.by_length.get(emitted, 0) + 1

    def merge(self, other: Acceptance) -> None:
        """Add another's cycles."""
        self.cycles += other.cycles
        self.emitted += other.emitted
        self.drafted += other.drafted
        for length, count in other.by_length.items():
            self.by_length[length] = self.by_length.get(length, 0) + count

    @property
    def length(self) -> float:
        """Mean tokens a cycle, bonus included; 0 before the first cycle."""
        return self.emitted / self.cycles if self.cycles else 0.0

    @property
    def accepted_by_position(self) -> list[int]:
        """How many cycles accepted their draft token of depth d, for d = 1, 2, ..."""
        deepest = max(self.by_length, default=1)
        return [sum(c for length, c in self.by_length.items() if length > d) for d in range(1, deepest)]

    def by_depth(self) -> list[float]:
        """Share of cycles that accepted at least d draft tokens, for d = 1, 2, ..."""
        return [count / self.cycles for count in self.accepted_by_position]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that has landed: its rows, the tokens that it computed or emitted, and how long it took.

    seconds: by the host's clock, from its launch or from when the step before landed, whichever was later.
    """

    kind: Literal["prefill", "decode"]
    rows: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class Stats:
    """Totals of an engine since its start.

    prompt_tokens: tokens prefilled; a preempted request counts once more when it resumes. queried_tokens:
    prompt tokens of requests when they first started; cached_tokens: those of them that came from the prefix
    cache. finished: requests that ended by themselves. acceptance: cycles of all requests.
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
