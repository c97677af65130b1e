"""The scheduler alone, over a simulated device that remembers what each slot of the cache holds."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.pace import MIN_CHUNK, PrefillPace
from nextn.engine.pages import PagePool
from nextn.engine.prefix_cache import TOKEN, Node
from nextn.engine.request import Request, SamplingParams
from nextn.engine.scheduler import Chunk, DecodeBatch, PrefillBatch, Running, Scheduler

PAGE = 4
RESERVE = 4

Content = tuple[str | None, tuple[int, ...]]


def _follows(text: list[int]) -> int:
    """The token after a text; few ways to go on, so that answers meet."""
    return 1000 + (len(text) + sum(text[-2:])) % 2


class _Memory(PagePool):
    """A pool that knows what was written into each slot; what is freed is forgotten."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, PAGE)
        self.slots: dict[tuple[int, int], Content | None] = {}

    def release(self, pages: Iterable[int]) -> None:
        for page in list(pages):
            super().release((page,))
            if self.references(page) == 0:
                for slot in range(PAGE):
                    self.slots.pop((page, slot), None)

    def write(self, page: int, slot: int, content: Content | None) -> None:
        assert self.references(page) == 1 or (page, slot) not in self.slots, "a shared page changed"
        self.slots[page, slot] = content

    def check_nodes(self, node: Node, salt: str | None, text: tuple[int, ...]) -> None:
        """Every page in the trie holds what its keys say."""
        for child in node.children.values():
            size = (PAGE + 1) * TOKEN.itemsize
            tokens = tuple(array(TOKEN.typecode, child.key[:size]))
            own = child.key[size + len(b"salt") :].decode() if child.key[size:] else None
            path = text + tokens if not text else text + tokens[1:]
            name = own if node.depth == 0 else salt
            for slot in range(PAGE):
                stop = node.depth * PAGE + slot + 2
                assert self.slots[child.page, slot] == (name, path[:stop]), "the trie names a page wrongly"
            self.check_nodes(child, name, path)


@dataclass
class _Row:
    """The device's side of an entry: the text as the model goes on with it, and how much is in the cache."""

    entry: Running
    text: list[int]
    n: int = 0


@dataclass
class _Flight:
    """A step under way: what it will bring each entry."""

    brings: list[tuple[Running, int]]
    width: int


@dataclass
class _Device:
    """Runs steps when they are launched, in order; the host learns of their tokens when they land."""

    scheduler: Scheduler
    memory: _Memory
    depth: int = 1
    rows: dict[Running, _Row] = field(default_factory=dict)
    flying: deque[_Flight] = field(default_factory=deque)
    ended: list[str] = field(default_factory=list)
    last: PrefillBatch | DecodeBatch | None = None
    decodable: set[Running] = field(default_factory=set)

    def step(self, count: int) -> bool:
        """One step of the engine, with `count` tokens a decoding row; False if there was nothing to do."""
        batch = self._plan()
        while batch is None and self.flying:
            self._land()
            batch = self._plan()
        if batch is not None:
            self._launch(batch, count)
        worked = batch is not None or bool(self.flying)
        while len(self.flying) >= self.depth:
            self._land()
        self.check()
        return worked

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.memory.check_nodes(self.scheduler.cache.root, None, ())

    def _plan(self) -> PrefillBatch | DecodeBatch | None:
        scheduler = self.scheduler
        before, spent = list(scheduler.running), scheduler.num_preemptions
        batch = scheduler.next_batch(bool(self.flying))
        released = [entry for entry in before if not entry.pages]
        assert not (self.flying and scheduler.num_preemptions > spent), "preempted with steps under way"
        stays = [entry for entry in before if entry.pages]
        assert all(gone.order > entry.order for gone in released for entry in stays), "an older one went"
        if isinstance(batch, PrefillBatch):
            started = {chunk.entry for chunk in batch.chunks}
            waits = {entry for entry in scheduler.running if _decodes(entry)} - started
            assert not (isinstance(self.last, PrefillBatch) and waits & self.decodable), (
                "decoding stands still"
            )
        self.decodable = {entry for entry in scheduler.running if _decodes(entry)}
        self.last = batch or self.last
        return batch

    def _launch(self, batch: PrefillBatch | DecodeBatch, count: int) -> None:
        if isinstance(batch, PrefillBatch):
            for chunk in batch.chunks:
                self._prefill(chunk)
            flight = _Flight([(chunk.entry, 1) for chunk in batch.chunks if chunk.is_last], 0)
        else:
            for entry in batch.entries:
                self._decode(self.rows[entry], count)
            flight = _Flight([(entry, count) for entry in batch.entries], RESERVE)
        for entry, _ in flight.brings:
            entry.ahead += flight.width
            entry.due += 1
        self.flying.append(flight)

    def _prefill(self, chunk: Chunk) -> None:
        entry = chunk.entry
        row = self.rows.get(entry)
        if row is None:
            row = self.rows[entry] = _Row(entry, list(entry.tokens), entry.cached)
            assert entry.cached % PAGE == 0
            assert entry.cached < len(entry.tokens), "nothing is left to compute"
        assert chunk.start == row.n
        assert chunk.length > 0
        assert chunk.is_last == (chunk.start + chunk.length == len(entry.tokens))
        if chunk.is_last:
            row.text.append(_follows(row.text))
        self._read(row)
        self._write(row, chunk.length)

    def _decode(self, row: _Row, count: int) -> None:
        entry = row.entry
        assert len(entry.pages) * PAGE >= entry.length + entry.ahead + RESERVE, "a step has too few pages"
        assert row.n <= entry.length + entry.ahead, "the row is longer than the host thinks"
        sure = len(entry.request.output_tokens) + sum(entry in dict(each.brings) for each in self.flying)
        assert sure < entry.request.params.max_tokens, "a row runs that is sure to end before"
        self._read(row)
        for position in range(row.n, row.n + RESERVE):  # the tree
            page = entry.pages[position // PAGE]
            assert self.memory.references(page) == 1, "a tree goes into a shared page"
            self.memory.write(page, position % PAGE, None)
        for _ in range(count):
            row.text.append(_follows(row.text))
        self._write(row, count)

    def _read(self, row: _Row) -> None:
        """All that the row attends is what the request alone would have there."""
        for position in range(row.n):
            slot = (row.entry.pages[position // PAGE], position % PAGE)
            assert self.memory.slots[slot] == self._content(row, position), "a row reads another's text"

    def _write(self, row: _Row, count: int) -> None:
        for position in range(row.n, row.n + count):
            page = row.entry.pages[position // PAGE]
            self.memory.write(page, position % PAGE, self._content(row, position))
        row.n += count

    def _content(self, row: _Row, position: int) -> Content:
        """The draft's entry depends on the token behind, and on all before it."""
        return row.entry.request.cache_salt, tuple(row.text[: position + 2])

    def _land(self) -> None:
        flight = self.flying.popleft()
        for entry, count in flight.brings:
            entry.ahead -= flight.width
            entry.due -= 1
            if not entry.pages:
                continue
            if flight.width:
                entry.length += count
            output, params = entry.request.output_tokens, entry.request.params
            text = entry.request.prompt_tokens + output
            for _ in range(count):
                text.append(_follows(text))
                output.append(text[-1])
                if len(output) == params.max_tokens:
                    self.scheduler.finish(entry, settled(entry))
                    self.ended.append(entry.request.request_id)
                    break


def _decodes(entry: Running) -> bool:
    return entry.is_prefilled and not entry.is_ending


def settled(entry: Running) -> int:
    """All that the host knows of, but the last token: the draft's entry of it has no next token yet."""
    return min(entry.length, len(entry.request.prompt_tokens) + len(entry.request.output_tokens) - 1)


@dataclass(frozen=True)
class _Arrival:
    """One request of the drawn load; `text` names the prompt that it begins like."""

    text: int
    length: int
    output: int
    comes: int
    leaves: int | None
    priority: int
    salt: str | None
    wants_prompt: bool

    def request(self, name: int) -> Request:
        params = SamplingParams(max_tokens=self.output, prompt_logprobs=0 if self.wants_prompt else None)
        prompt = [(position * (1 + self.text % 2)) % 5 for position in range(self.length)]
        if self.text >= 2:  # the same beginning, another end
            prompt[self.length // 2 :] = [7] * (self.length - self.length // 2)
        return Request(str(name), prompt, params, priority=self.priority, cache_salt=self.salt)


_arrivals = st.builds(
    _Arrival,
    text=st.integers(0, 3),
    length=st.integers(1, 26),
    output=st.integers(1, 20),
    comes=st.integers(0, 20),
    leaves=st.none() | st.integers(0, 40),
    priority=st.sampled_from((0, 0, 0, 1, -1)),
    salt=st.sampled_from((None, None, None, "tenant")),
    wants_prompt=st.sampled_from((False, False, False, True)),
)


@settings(max_examples=400)
@given(
    st.lists(_arrivals, min_size=1, max_size=12),
    st.integers(13, 40),
    st.integers(1, 6),
    st.integers(1, 40),
    st.lists(st.integers(1, RESERVE), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from((True, True, True, False)),
)
def test_any_load_ends_each_request_once_on_pages_that_hold_its_own_text(
    arrivals: list[_Arrival], pages: int, rows: int, chunk: int, emit: list[int], depth: int, caching: bool
) -> None:
    """Arrivals and aborts at any time, tiny pools, priorities, salts, steps in flight: after every step pages
    add up, every page in the trie is what its name says, and nobody reads what another text wrote."""
    memory = _Memory(pages)
    scheduler = Scheduler(memory, rows, chunk, RESERVE, prefix_cache=caching, settled=settled)
    device = _Device(scheduler, memory, depth)
    left = dict(enumerate(arrivals))
    aborted: list[str] = []
    for step in range(3000):
        for name, arrival in [item for item in left.items() if item[1].comes <= step]:
            scheduler.add(arrival.request(name))
            del left[name]
        for name, arrival in enumerate(arrivals):
            if arrival.leaves == step and scheduler.remove(str(name)):
                aborted.append(str(name))
                device.check()
        if not device.step(emit[step % len(emit)]) and not left:
            break
    assert sorted(device.ended + aborted) == sorted(map(str, range(len(arrivals)))), "not each ended once"
    assert memory.free + scheduler.cache.evictable == pages
    assert caching or memory.free == pages
    assert not scheduler.waiting
    assert not scheduler.running


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(2, 30)), min_size=2, max_size=8),
    st.integers(17, 24),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_the_oldest_is_never_preempted(
    sizes: list[tuple[int, int]], pages: int, rows: int, depth: int
) -> None:
    """Under any pressure of its own priority; so each request becomes the oldest once, and ends."""
    memory = _Memory(pages)
    scheduler = Scheduler(memory, rows, 8, RESERVE, settled=settled)
    device = _Device(scheduler, memory, depth)
    for name, (prompt, output) in enumerate(sizes):
        scheduler.add(_request(name, prompt, output))
    oldest: Running | None = None
    while device.step(2):
        if oldest is not None and oldest.request.request_id not in device.ended:
            assert scheduler.running[0] is oldest
        oldest = scheduler.running[0] if scheduler.running else None
    assert len(device.ended) == len(sizes)


def _request(name: int, prompt: int | list[int], output: int = 4, **fields: object) -> Request:
    """A prompt given by its tokens, or by its length and like no other's."""
    tokens = [100 * (1 + name) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=output, prompt_logprobs=fields.pop("prompt_logprobs", None))  # type: ignore[arg-type]
    return Request(str(name), tokens, params, **fields)  # type: ignore[arg-type]


def _scheduler(pages: int = 40, rows: int = 5, chunk: int = 64, **options: object) -> Scheduler:
    return Scheduler(PagePool(pages, PAGE), rows, chunk, RESERVE, settled=settled, **options)  # type: ignore[arg-type]


def _prefill(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One prefill step: (request, start, length) of its chunks; requests that are computed get a token."""
    batch = scheduler.next_batch()
    assert isinstance(batch, PrefillBatch)
    for chunk in batch.chunks:
        if chunk.is_last:
            chunk.entry.request.output_tokens.append(0)
    return [(chunk.entry.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]


def _decode(scheduler: Scheduler, count: int = 1) -> list[str]:
    """One decode step of `count` tokens a row, landed at once; the names of its rows."""
    batch = scheduler.next_batch()
    assert isinstance(batch, DecodeBatch)
    for entry in batch.entries:
        entry.length += count
        entry.request.output_tokens += [0] * count
    return [entry.request.request_id for entry in batch.entries]


class _Span(NamedTuple):
    start: int
    length: int


def _names(entries: list[Running]) -> list[str]:
    return [entry.request.request_id for entry in entries]


def test_a_prompt_is_prefilled_in_chunks_and_only_the_last_one_ends_it() -> None:
    """Ten tokens under a budget of four: 4, 4, 2; a chunk counts as computed once it is handed out."""
    scheduler = _scheduler(chunk=4)
    scheduler.add(_request(0, 10))
    seen = []
    while isinstance(batch := scheduler.next_batch(in_flight=True), PrefillBatch):
        (chunk,) = batch.chunks
        assert chunk.entry.length == chunk.start + chunk.length
        seen.append((chunk.start, chunk.length, chunk.is_last))
    assert seen == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert isinstance(batch, DecodeBatch), "a row whose last chunk is under way decodes next"


def test_a_removed_request_frees_its_row_and_pages() -> None:
    """Abort works for a waiting and for a running request, and says when there is nothing to remove."""
    scheduler = _scheduler(pages=8, rows=1, prefix_cache=False)
    scheduler.add(_request(0, 4))
    scheduler.add(_request(1, 4))
    scheduler.next_batch()
    assert [scheduler.remove(name) for name in ("1", "0", "0")] == [True, True, False]
    assert scheduler.pool.free == 8


def test_the_youngest_of_the_lowest_priority_is_preempted_and_goes_first_in_its_class() -> None:
    """2 came before 1, which is more important: under pressure 2 goes, and starts again before 3."""
    scheduler = _scheduler(pages=9, rows=3)
    for name, priority in ((0, 0), (2, 1), (1, 0), (3, 1)):
        scheduler.add(_request(name, 4, 40, priority=priority))
    assert len(_prefill(scheduler)) == 3
    assert _names(scheduler.running) == ["0", "1", "2"]
    for _ in range(3):
        _decode(scheduler, 2)
    assert _decode(scheduler, 2) == ["0", "1"]
    assert [request.request_id for request in scheduler.waiting] == ["2", "3"]
    assert scheduler.num_preemptions == 1


def test_waiting_requests_start_by_priority_and_then_by_arrival() -> None:
    """Nobody who runs is preempted for them."""
    scheduler = _scheduler(rows=1)
    for name, priority in ((0, 5), (1, 0), (2, -3), (3, 0)):
        scheduler.add(_request(name, 4, priority=priority))
        scheduler.next_batch()
    started = _names(scheduler.running)
    for _ in range(3):
        scheduler.finish(scheduler.running[0])
        scheduler.next_batch()
        started += _names(scheduler.running)
    assert started == ["0", "2", "1", "3"]


def test_prefill_and_decoding_alternate() -> None:
    """A long prompt beside a row that decodes; a step in between for each chunk."""
    scheduler = _scheduler(chunk=8)
    scheduler.add(_request(0, 8, 40))
    _prefill(scheduler)
    scheduler.add(_request(1, 24))
    for start in (0, 8, 16):
        _decode(scheduler)
        assert _prefill(scheduler) == [("1", start, 8)]
    assert _decode(scheduler) == ["0", "1"]


def test_the_pace_holds_only_while_others_decode() -> None:
    """Alone a prompt is computed in whole budgets; beside a decoding row as far as the time allows."""
    pace = PrefillPace(1.0, 0.0, 0.0, max_seconds=2.5 * MIN_CHUNK)
    for _ in range(2):
        pace.observe([_Span(0, 8)], 8.0)
    scheduler = Scheduler(PagePool(1000, PAGE), 4, 8 * MIN_CHUNK, RESERVE, pace=pace)
    scheduler.add(_request(0, 8 * MIN_CHUNK))
    assert _prefill(scheduler) == [("0", 0, 8 * MIN_CHUNK)]
    scheduler.add(_request(1, 8 * MIN_CHUNK))
    _decode(scheduler)
    assert _prefill(scheduler) == [("1", 0, 320)]
    scheduler.remove("0")
    assert _prefill(scheduler) == [("1", 320, 8 * MIN_CHUNK - 320)]
    scheduler.add(_request(2, 300))
    scheduler.add(_request(3, 300))
    _decode(scheduler)
    assert _prefill(scheduler) == [("2", 0, 300), ("3", 0, 20)], "together they take the time of one step"


def test_a_short_prompt_overtakes_a_long_one_that_still_goes_on() -> None:
    """By turns the oldest and the shortest come first; whoever comes first leaves the rest to the others."""
    scheduler = _scheduler(pages=100, chunk=20)
    scheduler.add(_request(0, 100))
    scheduler.add(_request(1, 90))
    scheduler.add(_request(2, 6))
    assert _prefill(scheduler) == [("0", 0, 20)]
    assert _prefill(scheduler) == [("2", 0, 6), ("0", 20, 14)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("0", 34, 20)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("0", 54, 20)], "now the shorter of the two"


def test_a_more_important_prompt_is_computed_first_however_long_it_is() -> None:
    """In the turn of the oldest and in the turn of the shortest."""
    scheduler = _scheduler(chunk=20)
    scheduler.add(_request(0, 30, priority=1))
    scheduler.add(_request(1, 60))
    assert [_prefill(scheduler) for _ in range(2)] == [[("1", 0, 20)], [("1", 20, 20)]]


def test_with_steps_under_way_nothing_is_preempted() -> None:
    """Pages short for the longest that the rows may have become: nothing is planned before those landed."""
    scheduler = _scheduler(pages=6, rows=2)
    for name in range(2):
        scheduler.add(_request(name, 4, 40))
    _prefill(scheduler)
    assert isinstance(scheduler.next_batch(), DecodeBatch)
    for entry in scheduler.running:
        entry.ahead = 4
    assert isinstance(scheduler.next_batch(in_flight=True), DecodeBatch)
    for entry in scheduler.running:
        entry.ahead = 8
    assert scheduler.next_batch(in_flight=True) is None
    assert scheduler.num_preemptions == 0
    for entry in scheduler.running:  # they brought less
        entry.ahead, entry.length = 0, 8
    assert isinstance(scheduler.next_batch(), DecodeBatch)
    assert scheduler.num_preemptions == 0


def test_requests_wait_for_a_prefix_that_is_being_computed_and_others_pass() -> None:
    """The first fills two pages; a stranger behind them starts meanwhile; then the rest of the others."""
    scheduler = _scheduler()
    for name in range(3):
        scheduler.add(_request(name, list(range(11))))
    scheduler.add(_request(3, 5))
    assert _prefill(scheduler) == [("0", 0, 11), ("3", 0, 5)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("1", 8, 3), ("2", 8, 3)]
    assert [entry.cached for entry in scheduler.running] == [0, 8, 8, 0]


def test_prompts_that_share_no_full_page_wait_for_nobody() -> None:
    """Of four tokens the last one's draft entry depends on the answer, so a page of four is not shared."""
    scheduler = _scheduler()
    for name in range(3):
        scheduler.add(_request(name, list(range(4))))
    assert _prefill(scheduler) == [("0", 0, 4), ("1", 0, 4), ("2", 0, 4)]


def test_a_follower_goes_on_where_the_first_one_was_aborted() -> None:
    """What was computed stays; the rest is the next one's to compute, while the third waits for it."""
    scheduler = _scheduler(chunk=10)
    for name in range(3):
        scheduler.add(_request(name, list(range(25))))
    assert _prefill(scheduler) == [("0", 0, 10)]
    assert scheduler.next_batch() is not None
    scheduler.remove("0")
    assert _prefill(scheduler) == [("1", 20, 5)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("2", 24, 1)]


def test_nobody_waits_for_a_less_important_request() -> None:
    """Its prefill might be put off again and again; the pages are computed twice instead."""
    scheduler = _scheduler(chunk=8)
    scheduler.add(_request(0, list(range(25)), priority=1))
    assert _prefill(scheduler) == [("0", 0, 8)]
    scheduler.add(_request(1, list(range(25))))
    assert _prefill(scheduler) == [("1", 8, 8)]
    assert _prefill(scheduler) == [("1", 16, 8)]
    assert _prefill(scheduler) == [("1", 24, 1), ("0", 8, 7)]
    scheduler.check_integrity()


def test_nobody_waits_for_a_request_that_has_its_duplicate_to_itself() -> None:
    """It will not put another page into the cache while it decodes."""
    scheduler = _scheduler()
    prompt = list(range(9))
    for name, rated in ((0, None), (1, 0)):
        scheduler.add(_request(name, prompt, 40, prompt_logprobs=rated))
        _prefill(scheduler)
        _decode(scheduler)
    scheduler.discard(scheduler.running[0])  # and what the cache had of it
    scheduler.add(_request(2, prompt))
    assert _prefill(scheduler) == [("2", 0, 9)]


def test_salts_separate_even_requests_of_one_moment() -> None:
    """Another tenant neither waits nor takes."""
    scheduler = _scheduler()
    for name, salt in enumerate((None, "a", "a", "b")):
        scheduler.add(_request(name, list(range(9)), cache_salt=salt))
    assert _prefill(scheduler) == [("0", 0, 9), ("1", 0, 9), ("3", 0, 9)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("2", 8, 1)]


def test_a_request_for_its_prompts_log_probabilities_computes_the_prompt() -> None:
    """It takes no page, but others may take its own; once rated, tokens need not be computed again."""
    scheduler = _scheduler()
    rated = _request(0, list(range(9)), 40, prompt_logprobs=0)
    scheduler.add(rated)
    scheduler.add(_request(1, list(range(9)), 40, prompt_logprobs=0))
    scheduler.add(_request(2, list(range(9)), 40))
    assert _prefill(scheduler) == [("0", 0, 9), ("1", 0, 9)]
    _decode(scheduler)
    assert _prefill(scheduler) == [("2", 8, 1)]
    for count, start in ((8, 4), (9, 8)):
        rated.prompt_logprobs = [None] * count
        scheduler._preempt(scheduler.running[0])
        rated.output_tokens.clear()
        _decode(scheduler)
        assert _prefill(scheduler) == [("0", start, 9 - start)]


def test_an_answer_is_part_of_what_the_next_turn_finds() -> None:
    """Prompt and output as far as both caches hold them, and the next token is known."""
    scheduler = _scheduler()
    scheduler.add(_request(0, 6, 12))
    _prefill(scheduler)
    while len((entry := scheduler.running[0]).request.output_tokens) < 12:
        _decode(scheduler)
    turn = entry.request.prompt_tokens + entry.request.output_tokens
    scheduler.finish(entry, settled(entry))
    assert scheduler.cache.evictable == 4  # 18 tokens
    scheduler.add(_request(1, [*turn, 5, 5, 5]))
    assert _prefill(scheduler) == [("1", 16, 5)]


def test_nobody_begins_with_what_a_discarded_request_computed() -> None:
    """Pages that another request runs with stay, until it is discarded too."""
    scheduler = _scheduler()
    for name in range(2):
        scheduler.add(_request(name, list(range(4 + 9 * (1 + name)))))
        _prefill(scheduler)
        _decode(scheduler)
    first, second = scheduler.running
    assert second.cached == 12
    scheduler.discard(first)
    assert scheduler.cache.evictable == 0
    scheduler.check_integrity()
    scheduler.discard(second)
    assert scheduler.pool.free == scheduler.pool.num_pages
    scheduler.check_integrity()


def test_without_a_prefix_cache_everything_is_computed() -> None:
    """Nobody waits, nothing is found, nothing stays."""
    scheduler = _scheduler(prefix_cache=False)
    for name in range(2):
        scheduler.add(_request(name, list(range(11))))
    assert _prefill(scheduler) == [("0", 0, 11), ("1", 0, 11)]
    for entry in list(scheduler.running):
        scheduler.finish(entry, settled(entry))
    assert scheduler.pool.free == scheduler.pool.num_pages


def test_admission_evicts_what_only_the_cache_holds() -> None:
    """A prompt that needs all pages starts although earlier texts fill the pool."""
    scheduler = _scheduler(pages=12)
    for name in range(3):
        scheduler.add(_request(name, 13))
        _prefill(scheduler)
        scheduler.finish(scheduler.running[0], 13)
    assert (scheduler.pool.free, scheduler.cache.evictable) == (3, 9)
    scheduler.add(_request(4, 44))
    assert _prefill(scheduler) == [("4", 0, 44)]
    assert scheduler.pool.free == 0


@pytest.mark.parametrize(("pages", "starts"), [(11, False), (12, True)])
def test_cached_pages_that_a_request_takes_are_not_counted_as_room_too(pages: int, starts: bool) -> None:
    """Seven pages for a prompt of 24, five of them cached and idle; four and a spare one are taken: 12."""
    scheduler = _scheduler(pages=pages)
    prompt = list(range(24))
    scheduler.add(_request(0, prompt))
    _prefill(scheduler)
    scheduler.finish(scheduler.running[0])
    scheduler.add(_request(1, 11))  # four pages
    _prefill(scheduler)
    scheduler.add(_request(2, prompt))
    assert scheduler.cache.evictable == 5
    scheduler.next_batch()
    scheduler.next_batch()
    assert ("2" in _names(scheduler.running)) == starts


def test_a_preempted_request_resumes_on_what_is_left_of_its_pages() -> None:
    """The pages that the pressure did not take are not computed again."""
    scheduler = _scheduler(pages=17)
    for name in range(2):
        scheduler.add(_request(name, 24, 40))
    _prefill(scheduler)
    while scheduler.num_preemptions == 0:
        _decode(scheduler, 4)
    (entry,) = scheduler.running
    (request,) = scheduler.waiting
    scheduler.finish(entry)
    known = len(request.prompt_tokens) + len(request.output_tokens)
    ((name, start, length),) = _prefill(scheduler)
    assert (name, start + length) == ("1", known)
    assert start >= 24


def test_running_rows_keep_a_spare_page_each() -> None:
    """An admission that would be followed by a preemption at once does not take place."""
    scheduler = _scheduler(pages=5, rows=3)
    for name in range(3):
        scheduler.add(_request(name, 4, 40))
    _prefill(scheduler)
    assert _names(scheduler.running) == ["0", "1"]
    assert scheduler.pool.free == 1


def test_many_waiting_requests_of_one_prefix_cost_little() -> None:
    """A step looks past so many and no more."""
    scheduler = _scheduler(rows=200)
    for name in range(300):
        scheduler.add(_request(name, list(range(20))))
    assert _prefill(scheduler) == [("0", 0, 20)]
    assert sum(job.keys is not None for job in scheduler._queue) <= 64
