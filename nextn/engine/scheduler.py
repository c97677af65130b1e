"""Which requests run next: admission, shared prefixes, chunked prefill, page growth and preemption.

Knows tokens and pages only: no tensor, no model, and of speculation just how many slots a step may write
beyond a row's length, and that the draft's entry of a token depends on the token after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nextn.engine.pages import PagePool
from nextn.engine.request import Request


@dataclass(slots=True, eq=False)
class Running:
    """A live request: its row, its pages, and how far its tokens are in the cache.

    tokens: prompt and, after a preemption, the output so far; what prefill has to compute.
    length: tokens whose latents are in the cache (the row's n), as far as the host knows.
    ahead: tokens that a step under way may add to them at most.
    prefix: the leading pages that others may share. cached: tokens in them that another request has computed.
    """

    request: Request
    row: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0
    ahead: int = 0
    prefix: Prefix | None = None
    cached: int = 0

    @property
    def is_prefilled(self) -> bool:
        """Whether the row has a root token and can decode."""
        return self.length >= len(self.tokens)


@dataclass(slots=True, eq=False)
class Prefix:
    """The leading pages of a prompt, held by several requests and filled once.

    tokens: how many the pages hold. holders: in order of arrival, never empty; the first one fills the pages,
    the others wait for it and start behind them. If it goes before it is done, the next one goes on from
    where it was. Once filled, the pages are only read: whatever a holder writes then lies behind them.
    """

    pages: list[int]
    tokens: int
    holders: list[Running]

    def follow(self, entry: Running) -> None:
        """Count what the first holder has filled as the entry's own."""
        filled = min(self.holders[0].length, self.tokens)
        if filled > entry.length:
            entry.cached += filled - entry.length
            entry.length = filled

    def is_filled_for(self, entry: Running) -> bool:
        """Whether the entry need not wait for another holder."""
        return entry is self.holders[0] or entry.length >= self.tokens


class Sharing:
    """Prefixes by group: a member that starts finds here the pages that another one holds.

    A prefix lives as long as a running request holds it; nothing is kept for later.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._prefixes: dict[str, Prefix] = {}

    def find(self, request: Request) -> Prefix | None:
        """The prefix whose pages the request is to take when it starts, instead of pages of its own.

        Log-probabilities of the prompt come from computing it, so a request that wants them takes nothing.
        """
        if request.group is None or request.params.prompt_logprobs is not None:
            return None
        return self._prefixes.get(request.group)

    def join(self, entry: Running, prefix: Prefix | None) -> None:
        """Note a request that starts with the pages of `prefix`, or with its own, which others may take."""
        group = entry.request.group
        if prefix is not None:
            prefix.holders.append(entry)
        elif group is not None and group not in self._prefixes:
            # The draft's entry i is the pair (h_i, t_{i+1}): the last prompt token's depends on the answer.
            count = (len(entry.request.prompt_tokens) - 1) // self._page_size
            if count > 0:
                prefix = Prefix(entry.pages[:count], count * self._page_size, [entry])
                self._prefixes[group] = prefix
        entry.prefix = prefix

    def leave(self, entry: Running) -> None:
        """Forget a request that ends or is preempted, before it gives its pages back."""
        prefix, group = entry.prefix, entry.request.group
        if prefix is None or group is None:
            return
        for other in prefix.holders:
            prefix.follow(other)
        prefix.holders.remove(entry)
        entry.prefix = None
        if not prefix.holders:
            del self._prefixes[group]

    def check_integrity(self, running: Sequence[Running]) -> None:
        """Raise `AssertionError` unless pages are shared only as prefixes, by running requests."""
        holders = [entry for prefix in self._prefixes.values() for entry in prefix.holders]
        assert len(holders) == len(set(holders)), "a request holds two prefixes"
        assert set(holders) == {entry for entry in running if entry.prefix is not None}, "holders do not run"
        own: set[int] = set()
        for entry in running:
            first = entry.prefix.pages if entry.prefix else []
            assert entry.pages[: len(first)] == first, "a request does not begin with its prefix"
            rest = entry.pages[len(first) :]
            assert len(own) + len(rest) == len(own.union(rest)), "a page is shared, but in no prefix"
            own.update(rest)
        shared = [page for prefix in self._prefixes.values() for page in prefix.pages]
        assert own.isdisjoint(shared), "a page of a prefix is another request's own"


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
        self._sharing = Sharing(pool.page_size)

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
        """Give back the row and the pages of a request that ended or is preempted; others keep theirs."""
        self._sharing.leave(entry)
        self.running.remove(entry)
        self._free_rows.append(entry.row)
        self.pool.release(entry.pages)
        entry.pages = []

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless running requests hold all pages in use, and share prefixes alone."""
        self.pool.check_integrity([entry.pages for entry in self.running])
        self._sharing.check_integrity(self.running)

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
            prefix = self._sharing.find(request)
            needed = self._pages_to_start(request, prefix)
            shared = prefix.pages if prefix else []
            self.pool.share(shared)
            tokens = request.prompt_tokens + request.output_tokens
            entry = Running(request, self._free_rows.pop(), tokens, [*shared, *self.pool.allocate(needed)])
            self._sharing.join(entry, prefix)
            self.running.append(entry)

    def _can_admit(self) -> bool:
        """Whether the first waiting request can start now."""
        if not self.waiting or not self._free_rows:
            return False
        request = self.waiting[0]
        needed = self._pages_to_start(request, self._sharing.find(request))
        # One spare page a running row, or an admission would be followed at once by a preemption.
        return needed + len(self.running) <= self.pool.free

    def _pages_to_start(self, request: Request, prefix: Prefix | None) -> int:
        """Pages that a request needs for all its tokens and a step, beyond those of `prefix`."""
        tokens = len(request.prompt_tokens) + len(request.output_tokens)
        return self.pool.pages_for(tokens + self._reserve) - (len(prefix.pages) if prefix else 0)

    def _chunks(self) -> list[Chunk]:
        """Fill the token budget of one prefill step, in order of arrival.

        A request whose prefix another one is filling waits for it: that one always has a chunk.
        """
        budget = self._chunk_size
        chunks = []
        for entry in self.running:
            if entry.prefix is not None:
                entry.prefix.follow(entry)
                if not entry.prefix.is_filled_for(entry):
                    continue
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
