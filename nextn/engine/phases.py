"""How long each phase of a decode step takes: on a GPU between events, in a captured step too."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch


class PhaseClock:
    """Marks the ends of a step's phases; `start` comes first.

    captured: the marks become part of a CUDA graph, so that every replay sets them anew.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._cuda, self._captured = device.type == "cuda", captured
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """The named phase ends here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True, external=self._captured)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def clear(self, keep: int = 0) -> None:
        """Forget all marks but the first `keep`: what is recorded runs once before it is."""
        del self._marks[keep:]

    def milliseconds(self) -> dict[str, float]:
        """Duration of each phase of the last run; waits for its end."""
        return dict(self._durations())

    def _durations(self) -> Iterator[tuple[str, float]]:
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                yield phase, (after - before) * 1e3
            else:
                assert isinstance(before, torch.cuda.Event)
                assert isinstance(after, torch.cuda.Event)
                after.synchronize()
                yield phase, before.elapsed_time(after)
