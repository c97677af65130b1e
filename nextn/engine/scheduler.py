"""Which requests run next: admission, chunked prefill, page growth and preemption.

Knows tokens and pages only: no tensor, no model, and of speculation just how many slots a step may write
beyond a row's length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nextn.engine.pages import PagePool
from nextn.engine.request import Request


@dataclass(slots=True, eq=False)
class Running:
    """A live request: its row, its pages, and how far its tokens are in the cache.

    tokens: prompt and, after a preemption, the output so far; what prefill has to compute.
    length: tokens whose latents are in the cache (the row's n), as far as the host knows.
    ahead: tokens that a step under way may add to them at most.
    """

    request: Request
    row: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0
    ahead: int = 0

    @property
    def is_prefilled(self) -> bool:
        """Whether the row has a root token and can decode."""
        return self.length >= len(self.tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens of a request to prefill from `start`; `is_last` chunks end by sampling a token."""

    entry: Running
    start: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of several requests for one prefill step."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Requests that all advance by one decode step."""

    entries: tuple[Running, ...]


class Scheduler:
    """Waiting and running requests over one pool of pages and one set of rows.

    reserve: slots beyond a row's length that any step may write (the largest tree).
    """

    def __init__(self, pool: PagePool, max_rows: int, chunk_size: int, reserve: int) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.num_preemptions = 0
        self._chunk_size = chunk_size
        self._reserve = reserve
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it fits the pool when it is alone."""
        self.waiting.append(request)

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is; False when it is not here (any more)."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        for entry in self.running:
            if entry.request.request_id == request_id:
                self.finish(entry)
                return True
        return False

    def finish(self, entry: Running) -> None:
        """Give back the row and the pages of a request that ended or is preempted."""
        self.running.remove(entry)
        self._free_rows.append(entry.row)
        self.pool.release(entry.pages)
        entry.pages = []

    def next_batch(self) -> PrefillBatch | DecodeBatch | None:
        """Prefill while there is something to prefill, else decode everything that runs."""
        self._admit()
        chunks = self._chunks()
        if chunks:
            return PrefillBatch(tuple(chunks))
        if not self.running:
            return None
        self._grow()
        return DecodeBatch(tuple(self.running))

    def next_ahead(self) -> DecodeBatch | None:
        """The rows that run, once more, while the step before is still under way; None if that cannot be.

        It cannot where a request is to be started or prefilled, or where the pages would not suffice for
        the longest that each row may have become: what comes next then depends on that step's outcome.
        """
        if not self.running or self._can_admit() or not all(entry.is_prefilled for entry in self.running):
            return None
        if sum(map(self._missing, self.running)) > self.pool.free:
            return None
        self._grow()
        return DecodeBatch(tuple(self.running))

    def _missing(self, entry: Running) -> int:
        """Pages that the entry's next step needs beyond its own."""
        slots = entry.length + entry.ahead + self._reserve
        return max(0, self.pool.pages_for(slots) - len(entry.pages))

    def _admit(self) -> None:
        """Start waiting requests in order while there are a row and pages for all their tokens."""
        while self._can_admit():
            request = self.waiting.popleft()
            tokens = request.prompt_tokens + request.output_tokens
            pages = self.pool.allocate(self._pages_to_start(request))
            self.running.append(Running(request, self._free_rows.pop(), tokens, pages))

    def _can_admit(self) -> bool:
        """Whether the first waiting request can start now."""
        if not self.waiting or not self._free_rows:
            return False
        needed = self._pages_to_start(self.waiting[0])
        # One spare page a running row, or an admission would be followed at once by a preemption.
        return needed + len(self.running) <= self.pool.free

    def _pages_to_start(self, request: Request) -> int:
        tokens = len(request.prompt_tokens) + len(request.output_tokens)
        return self.pool.pages_for(tokens + self._reserve)

    def _chunks(self) -> list[Chunk]:
        """Fill the token budget of one prefill step, in order of arrival."""
        budget = self._chunk_size
        chunks = []
        for entry in self.running:
            missing = len(entry.tokens) - entry.length
            if missing <= 0 or budget == 0:  # decoding rows are past their prefill
                continue
            length = min(missing, budget)
            budget -= length
            chunks.append(Chunk(entry, entry.length, length, length == missing))
        return chunks

    def _grow(self) -> None:
        """Give every running row the pages its next step may write; preempt the youngest if they run out."""
        for entry in tuple(self.running):
            while entry.pages:  # a preempted entry has none left
                missing = self._missing(entry)
                if missing <= self.pool.free:
                    entry.pages.extend(self.pool.allocate(missing))
                    break
                self._preempt(self.running[-1])

    def _preempt(self, entry: Running) -> None:
        """Release a request and queue it first; it resumes by prefilling its prompt and output again."""
        self.finish(entry)
        self.waiting.appendleft(entry.request)
        self.num_preemptions += 1
