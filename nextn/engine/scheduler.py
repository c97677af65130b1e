"""Which requests run next: admission, chunked prefill, page growth and preemption.

Knows tokens and pages only: no tensor, no model, and of speculation just how many slots a step may write
beyond a row's length. Requests go by priority, then by arrival, wherever one has to come first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from nextn.engine.pace import PrefillPace
from nextn.engine.pages import PagePool
from nextn.engine.prefix_cache import Node, PageKeys, PrefixCache
from nextn.engine.request import Request

MAX_PASSED = 64
"""Waiting requests that one step looks past, because others compute their prefix just now."""

MAX_NAMED = 1 << 17
"""Tokens of waiting requests whose pages one step names (hashes), beside the first: rows that decode wait."""

Order = tuple[int, int]
"""Priority, the lower first, and the number of arrival; a request keeps both for life."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that does not run: it is new or was preempted.

    keys: its pages' names, made when its turn comes near. node: how far the prefix cache had them when last
    asked.
    """

    request: Request
    order: Order
    keys: PageKeys | None = None
    node: Node | None = None


@dataclass(slots=True, eq=False)
class Running:
    """A live request: its row, its pages, and how far its tokens are in the cache.

    tokens: prompt and, after a preemption, the output so far; what prefill has to compute.
    node: down to there its first pages are in the prefix cache, and those that its prefill fills go below it.
    length: tokens whose latents are in the cache (the row's n), as far as the host knows, or will be by the
    prefill steps that it was given.
    ahead: tokens that decode steps under way may add to them at most.
    due: tokens that steps under way bring its request at least, one each.
    cached: tokens of them that it took from the prefix cache when it started.
    pages: none once it has ended or was preempted.
    """

    request: Request
    row: int
    tokens: list[int]
    order: Order
    keys: PageKeys
    node: Node
    pages: list[int] = field(default_factory=list)
    length: int = 0
    ahead: int = 0
    due: int = 0
    cached: int = 0

    @property
    def missing(self) -> int:
        """Tokens left to prefill."""
        return max(0, len(self.tokens) - self.length)

    @property
    def is_prefilled(self) -> bool:
        """Whether the row can decode: it has a root token, or will by the prefill steps under way."""
        return self.length >= len(self.tokens)

    @property
    def is_ending(self) -> bool:
        """Whether the steps under way take the request to its token limit, however little they bring."""
        return len(self.request.output_tokens) + self.due >= self.request.params.max_tokens


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


def nothing_settled(entry: Running) -> int:
    """Of a request that goes, keep only what its prefill left in the prefix cache."""
    return 0


class Scheduler:
    """Waiting and running requests over one pool of pages and one set of rows.

    chunk_size: most tokens of a prefill step. reserve: slots beyond a row's length that any step may write
    (the largest tree). pace: what a prefill step may compute while requests decode; None for no limit but
    `chunk_size`. settled: of a request that is preempted or removed, how many tokens' latents are whole in
    both models.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        chunk_size: int,
        reserve: int,
        *,
        prefix_cache: bool = True,
        pace: PrefillPace | None = None,
        settled: Callable[[Running], int] = nothing_settled,
    ) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, enabled=prefix_cache)
        self.running: list[Running] = []
        self.num_preemptions = 0
        self._queue: list[Waiting] = []
        self._arrivals = 0
        self.chunk_size = chunk_size
        self._reserve = reserve
        self._pace = pace
        self._settled = settled
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._prefilled_last = False
        self._shortest_first = False

    @property
    def waiting(self) -> list[Request]:
        """Requests that do not run, in the order in which they will start."""
        return [job.request for job in self._queue]

    @property
    def num_waiting(self) -> int:
        """How many they are."""
        return len(self._queue)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it fits the pool when it is alone."""
        self._arrivals += 1
        self._enqueue(Waiting(request, (request.priority, self._arrivals)))

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is; False when it is not here (any more)."""
        for job in self._queue:
            if job.request.request_id == request_id:
                self._queue.remove(job)
                return True
        for entry in self.running:
            if entry.request.request_id == request_id:
                self.finish(entry, self._settled(entry))
                return True
        return False

    def finish(self, entry: Running, valid: int = 0) -> None:
        """Give back the row and the pages of a request that ended or is preempted.

        valid: tokens whose latents are whole in both models; the full pages among them stay in the prefix
        cache, beside those that its prefill left there.
        """
        request = entry.request
        entry.keys.extend(request.output_tokens[len(entry.tokens) - len(request.prompt_tokens) :])
        self.cache.release(entry.node, entry.keys, entry.pages, self.cache.keyed(entry.keys, valid))
        self.running.remove(entry)
        self._free_rows.append(entry.row)
        entry.pages = []

    def discard(self, entry: Running) -> None:
        """`finish` a request whose latents may be damaged: nobody is to begin with what it computed."""
        self.finish(entry)
        self.cache.forget(entry.node)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless running requests and the prefix cache hold all pages in use."""
        self.cache.check_integrity([entry.pages for entry in self.running])
        rows = [entry.row for entry in self.running]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows), "a row is held twice"
        for jobs in (self._queue, self.running):
            assert [job.order for job in jobs] == sorted(job.order for job in jobs), "requests out of order"
        for entry in self.running:
            assert not entry.node.is_evicted, "a running request's page was evicted"
            assert entry.node.depth <= len(entry.pages), "a request has fewer pages than it shares"

    def next_batch(self, in_flight: bool = False) -> PrefillBatch | DecodeBatch | None:
        """What to run next; the caller starts it at once. None if there is nothing to run now.

        Where some requests decode and others have a prompt to compute, the steps alternate. in_flight: steps
        are under way. None is returned too, then, if pages are short for the longest that the rows may have
        become: what to do depends on those steps' outcome.
        """
        self._admit()
        decoding, prefilling = self._decoding(), self._prefilling()
        if decoding and (self._prefilled_last or not prefilling):
            if in_flight and sum(map(self._lacking, decoding)) > self.cache.available:
                return None
            self._grow(decoding)
            entries = tuple(entry for entry in decoding if entry.pages)
            if entries:
                self._prefilled_last = False
                return DecodeBatch(entries)
        chunks = self._chunks(paced=bool(decoding))
        if not chunks:
            return None
        self._prefilled_last = True
        return PrefillBatch(tuple(chunks))

    def upcoming_prefill(self) -> list[Running]:
        """Requests that the next step would prefill, as far as they run by now; none if it would decode."""
        return [] if self._prefilled_last and self._decoding() else self._prefilling()

    def _decoding(self) -> list[Running]:
        """Requests that a decode step would advance."""
        return [entry for entry in self.running if entry.is_prefilled and not entry.is_ending]

    def _prefilling(self) -> list[Running]:
        """Requests with a prompt to compute."""
        return [entry for entry in self.running if not entry.is_prefilled]

    def _enqueue(self, job: Waiting) -> None:
        insort(self._queue, job, key=lambda each: each.order)

    def _admit(self) -> None:
        """Start waiting requests in order while there are rows, and pages for all their tokens.

        One whose prefix is being computed just now waits for it, and others may pass.
        """
        passed = named = 0
        for job in self._queue[: MAX_PASSED + len(self._free_rows)]:
            if not self._free_rows or passed == MAX_PASSED:
                return
            if job.keys is None:
                length = job.request.num_tokens
                if named and named + length > MAX_NAMED:
                    return
                named += length
            keys, node, limit = self._look_up(job)
            if self._is_in_the_making(job, keys, node, limit):
                passed += 1
                continue
            needed = self._pages_to_start(job.request) - node.depth
            # One spare page a running row, or an admission would be followed at once by a preemption.
            if needed + self.cache.idle_pages(node) + len(self.running) > self.cache.available:
                return
            self._queue.remove(job)
            self._start(job, keys, node, needed)

    def _start(self, job: Waiting, keys: PageKeys, node: Node, needed: int) -> None:
        """Give a request a row, the cached pages down to `node` and `needed` more."""
        request = job.request
        pages = self.cache.acquire(node) + self.cache.allocate(needed)
        cached = node.depth * self.pool.page_size
        entry = Running(
            request=request,
            row=self._free_rows.pop(),
            tokens=request.prompt_tokens + request.output_tokens,
            order=job.order,
            keys=keys,
            node=node,
            pages=pages,
            length=cached,
            cached=cached,
        )
        insort(self.running, entry, key=lambda each: each.order)

    def _pages_to_start(self, request: Request) -> int:
        """Pages for all of a request's tokens and a step."""
        return self.pool.pages_for(request.num_tokens + self._reserve)

    def _look_up(self, job: Waiting) -> tuple[PageKeys, Node, int]:
        """A waiting request's keys, how far the prefix cache has them, and the most pages it may take.

        The last token is on no named page, so at least one is computed. Log-probabilities of the prompt come
        from computing it: as long as some are missing, only what was rated before may be taken.
        """
        request = job.request
        usable = request.num_tokens
        if job.keys is None:
            tokens = request.prompt_tokens + request.output_tokens
            job.keys = PageKeys(tokens, self.pool.page_size, request.cache_salt)
        rated = len(request.prompt_logprobs)
        if request.params.prompt_logprobs is not None and rated < len(request.prompt_tokens):
            usable = max(0, rated - 1)
        limit = self.cache.keyed(job.keys, usable)
        job.node = self.cache.match(job.keys, limit, job.node)
        return job.keys, job.node, limit

    def _is_in_the_making(self, job: Waiting, keys: PageKeys, node: Node, limit: int) -> bool:
        """Whether a running request is to add the very page that a waiting one lacks first."""
        depth = node.depth
        if depth >= limit:
            return False
        return any(
            entry.node is node
            and depth < self.cache.keyed(entry.keys, len(entry.tokens))
            and entry.request.priority <= job.request.priority  # or it might be passed again and again
            and entry.keys[depth] == keys[depth]
            for entry in self.running
            if not entry.is_prefilled
        )

    def _chunks(self, *, paced: bool) -> list[Chunk]:
        """Fill the token budget of one prefill step, by turns from the oldest and from the shortest rest.

        So a long prompt holds up no short ones, and they do not hold it up for ever. paced: keep the pace.
        """
        entries = self._prefilling()
        if self._shortest_first:
            entries.sort(key=lambda entry: (entry.request.priority, entry.missing))
        self._shortest_first = not self._shortest_first
        budget = self.chunk_size
        chunks: list[Chunk] = []
        for entry in entries:
            length = min(entry.missing, budget)
            if paced and self._pace is not None:
                length = self._pace.limit(entry.length, length, chunks)
            if length == 0:
                break
            budget -= length
            chunks.append(Chunk(entry, entry.length, length, length == entry.missing))
            self._advance(entry, length)
        return chunks

    def _advance(self, entry: Running, length: int) -> None:
        """Count a chunk as computed: whatever reads its pages runs after it."""
        entry.length += length
        full = self.cache.keyed(entry.keys, entry.length)
        entry.node = self.cache.insert(entry.node, entry.keys, entry.pages, full)

    def _lacking(self, entry: Running) -> int:
        """Pages that the entry's next step needs beyond its own."""
        slots = entry.length + entry.ahead + self._reserve
        return max(0, self.pool.pages_for(slots) - len(entry.pages))

    def _grow(self, decoding: list[Running]) -> None:
        """Give rows the pages that their next step may write; the last in order are preempted for it."""
        for entry in decoding:
            while entry.pages:  # a preempted entry has none left
                lacking = self._lacking(entry)
                if lacking <= self.cache.available:
                    entry.pages += self.cache.allocate(lacking)
                    break
                self._preempt(self.running[-1])

    def _preempt(self, entry: Running) -> None:
        """Release a request and queue it again, in its old place; what stays cached it need not prefill."""
        self.finish(entry, self._settled(entry))
        self._enqueue(Waiting(entry.request, entry.order, entry.keys, entry.node))
        self.num_preemptions += 1
