"""The trie of pages: what a prompt finds in it, what it holds, and what goes first when pages are short."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nextn.engine.pages import PagePool
from nextn.engine.prefix_cache import Node, PageKeys, PrefixCache
from nextn.errors import CapacityError

PAGE = 3


def _kept(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> None:
    """A request with these tokens has come and gone, with all its pages computed."""
    pages = cache.allocate(-(-len(tokens) // cache._pool.page_size))
    keys = PageKeys(tokens, cache._pool.page_size, salt)
    cache.release(cache.root, keys, pages, cache.keyed(keys, len(tokens)))


def _found(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> int:
    """Pages that a prompt finds."""
    keys = PageKeys(tokens, cache._pool.page_size, salt)
    return cache.match(keys, cache.keyed(keys, len(tokens) - 1)).depth


@given(st.integers(1, 5), st.integers(0, 24), st.integers(1, 9), st.integers(1, 9))
def test_after_c_common_tokens_a_hit_is_c_minus_one_over_page(
    page: int, common: int, rest: int, other: int
) -> None:
    """Slot i of the draft depends on token i + 1, so the page that holds the last common token differs."""
    pool = PagePool(64, page)
    cache = PrefixCache(pool)
    begins = list(range(common))
    _kept(cache, begins + [100 + i for i in range(rest)])
    assert _found(cache, begins + [200 + i for i in range(other)]) == max(0, common - 1) // page


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 4))
def test_the_same_prompt_again_leaves_at_least_one_token_to_compute(tokens: list[int], page: int) -> None:
    """Even a text that is known to its end."""
    cache = PrefixCache(PagePool(32, page))
    _kept(cache, [*tokens, 7, 7, 7, 7, 7])
    assert _found(cache, tokens) == (len(tokens) - 1) // page


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=9), st.sampled_from((None, "", "a"))),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_salts_never_mix(texts: list[tuple[list[int], str | None]]) -> None:
    """A text finds exactly what it would in a cache that only its own salt had used."""
    everyone = PrefixCache(PagePool(64, 1))
    alone = {salt: PrefixCache(PagePool(64, 1)) for _, salt in texts}
    for tokens, salt in texts:
        assert _found(everyone, tokens, salt) == _found(alone[salt], tokens, None)
        _kept(everyone, tokens, salt)
        _kept(alone[salt], tokens, None)


def test_a_disabled_cache_keeps_and_finds_nothing() -> None:
    """All pages are free again at once."""
    pool = PagePool(8, PAGE)
    cache = PrefixCache(pool, enabled=False)
    _kept(cache, list(range(12)))
    assert pool.free == 8
    assert _found(cache, list(range(12))) == 0


def test_pages_go_by_their_last_use_and_a_text_from_its_end() -> None:
    """The oldest text loses its last page first; what was used again outlives what was not."""
    pool = PagePool(12, 1)
    cache = PrefixCache(pool)
    first, second = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    _kept(cache, first)
    _kept(cache, second)
    assert (pool.free, cache.evictable) == (4, 8)
    held = cache.allocate(5)
    assert (_found(cache, first), _found(cache, second)) == (3, 4)
    keys = PageKeys(first, 1)
    node = cache.match(keys, 2)
    cache.release(node, keys, cache.acquire(node), 0)  # its first two pages are used once more
    held += cache.allocate(5)
    assert (_found(cache, first), _found(cache, second)) == (2, 0)
    cache.check_integrity([held])


def test_what_a_request_holds_is_never_evicted() -> None:
    """A refusal names the figures and evicts nothing."""
    pool = PagePool(6, 1)
    cache = PrefixCache(pool)
    _kept(cache, [1, 2, 3, 4])
    keys = PageKeys([1, 2, 9], 1)
    pages = cache.acquire(cache.match(keys, 2))
    with pytest.raises(CapacityError, match="6 cache pages are needed, 3 are free and 2 evictable"):
        cache.allocate(6)
    assert cache.evictable == 2
    held = cache.allocate(5)
    assert _found(cache, [1, 2, 3, 4]) == 1
    cache.check_integrity([pages, held])


def test_a_duplicate_stays_its_requests_own_until_it_ends() -> None:
    """The trie keeps the page that came first; the later one is freed, its text goes on below the first."""
    pool = PagePool(8, 1)
    cache = PrefixCache(pool)
    one, two = PageKeys([1, 2, 3], 1), PageKeys([1, 2, 3, 4, 5], 1)
    mine, other = cache.allocate(3), cache.allocate(5)
    node = cache.insert(cache.root, one, mine, 2)
    assert cache.insert(cache.root, two, other, 4) is cache.root
    cache.check_integrity([mine, other])
    cache.release(cache.root, two, other, 4)
    assert (pool.free, cache.evictable) == (3, 2)
    cache.release(node, one, mine, 2)
    assert (pool.free, cache.evictable) == (4, 4)
    assert _found(cache, [1, 2, 3, 4, 5]) == 4
    cache.check_integrity([])


def test_an_earlier_match_goes_on_from_where_it_was() -> None:
    """After evictions and additions it is what a match from the root finds."""
    pool = PagePool(10, 1)
    cache = PrefixCache(pool)
    text = list(range(9))
    keys = PageKeys(text, 1)
    _kept(cache, text[:5])
    node = cache.match(keys, 8)
    assert node.depth == 4
    cache._pool.release(cache.allocate(9))  # evicts all but one
    assert cache.match(keys, 8, node).depth == 1
    _kept(cache, text)
    node = cache.match(keys, 8, node)
    assert node is cache.match(keys, 8)
    assert node.depth == 8
    assert cache.match(keys, 3, node).depth == 3


def test_what_is_forgotten_goes_with_all_that_is_below_it() -> None:
    """But for pages that a request holds: they stay, and so do those above them."""
    pool = PagePool(12, 1)
    cache = PrefixCache(pool)
    one, two = [1, 2, 3, 7, 4, 5], [1, 2, 3, 7, 8, 9]
    _kept(cache, one)
    _kept(cache, two)
    keys = PageKeys(one, 1)
    pages = cache.acquire(cache.match(keys, 2))
    cache.forget(cache.match(keys, 3))
    assert (_found(cache, one), _found(cache, two)) == (2, 2)
    cache.forget(cache.match(keys, 2))
    assert _found(cache, one) == 2
    cache.check_integrity([pages])


@dataclass
class _Holder:
    """A request of the model below."""

    text: tuple[int, ...]
    salt: str | None
    keys: PageKeys
    pages: list[int]
    node: Node
    filled: int


class _Model(RuleBasedStateMachine):
    """Any history of requests against a plain model: a set of cached texts, each with its page and last use.

    A page's text is all tokens from the root to the one behind it. What the trie finds, holds and evicts is
    worked out anew from that set each time.
    """

    @initialize(pages=st.integers(4, 24), page=st.integers(1, 3))
    def start(self, pages: int, page: int) -> None:
        self.pool = PagePool(pages, page)
        self.page = page
        self.cache = PrefixCache(self.pool)
        self.holders: list[_Holder] = []
        self.cached: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.used: dict[tuple[str | None, tuple[int, ...]], tuple[int, int]] = {}
        self.now = 0

    def _prefix(self, holder: _Holder, depth: int) -> tuple[str | None, tuple[int, ...]]:
        return holder.salt, holder.text[: depth * self.page + 1]

    def _held(self) -> set[int]:
        return {page for holder in self.holders for page in holder.pages}

    def _evict_as_expected(self, count: int) -> None:
        """Take from the model what an allocation of `count` pages has to evict."""
        held = self._held()
        for _ in range(count - self.pool.free):
            idle = [name for name, page in self.cached.items() if page not in held]
            leaves = [
                name
                for name in idle
                if not any(
                    salt == name[0] and len(text) > len(name[1]) and text[: len(name[1])] == name[1]
                    for salt, text in self.cached
                )
            ]
            victim = min(leaves, key=lambda name: self.used[name])
            del self.cached[victim], self.used[victim]

    @rule(
        text=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from((None, None, "s")),
        looks=st.sampled_from((True, True, False)),
    )
    def come(self, text: list[int], salt: str | None, looks: bool) -> None:
        """A request starts with what it finds (or does not look, as for its prompt's log-probabilities)."""
        keys = PageKeys(text, self.page, salt)
        limit = self.cache.keyed(keys, len(text) - 1) if looks else 0
        assert limit in (0, (len(text) - 1) // self.page)
        node = self.cache.match(keys, limit)
        holder = _Holder(tuple(text), salt, keys, [], node, node.depth)
        expected = 0
        while expected < limit and self._prefix(holder, expected + 1) in self.cached:
            expected += 1
        assert node.depth == expected
        needed = self.pool.pages_for(len(text)) - node.depth
        if needed + self.cache.idle_pages(node) > self.cache.available:
            return
        holder.pages = self.cache.acquire(node)
        self.holders.append(holder)
        self._evict_as_expected(needed)
        holder.pages += self.cache.allocate(needed)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), pages=st.integers(1, 4))
    def fill(self, which: int, pages: int) -> None:
        """A request computes its next pages, and they go into the trie at once."""
        holder = self.holders[which % len(self.holders)]
        holder.filled = min(holder.filled + pages, len(holder.keys))
        node = self.cache.insert(holder.node, holder.keys, holder.pages, holder.filled)
        for depth in range(holder.node.depth, holder.filled):
            name = self._prefix(holder, depth + 1)
            if name in self.cached:
                assert node.depth == depth
                break
            self.cached[name] = holder.pages[depth]
        holder.node = node

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), output=st.lists(st.integers(0, 1), max_size=4), keep=st.booleans())
    def leave(self, which: int, output: list[int], keep: bool) -> None:
        """A request ends after some output, for which there was room."""
        holder = self.holders[which % len(self.holders)]
        room = len(holder.pages) * self.page - len(holder.text)
        holder.keys.extend(output[:room])
        holder.text += tuple(output[:room])
        kept = self.cache.keyed(holder.keys, len(holder.text)) if keep else 0
        self.holders.remove(holder)
        self.cache.release(holder.node, holder.keys, holder.pages, kept)
        self.now += 1
        for depth in range(max(kept, holder.node.depth)):
            name = self._prefix(holder, depth + 1)
            self.cached.setdefault(name, holder.pages[depth])
            self.used[name] = (self.now, -depth)

    @invariant()
    def adds_up(self) -> None:
        """References, idle pages and the trie itself are the model's."""
        self.cache.check_integrity([holder.pages for holder in self.holders])
        held = self._held()
        pages = [node.page for node in self.cache._below(self.cache.root)]
        assert sorted(pages) == sorted(self.cached.values())
        assert self.cache.evictable == sum(page not in held for page in self.cached.values())
        assert self.pool.free == self.pool.num_pages - len(held | set(self.cached.values()))


TestAnyHistory = _Model.TestCase
TestAnyHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_long_prompt_costs_a_few_milliseconds() -> None:
    """100,000 tokens in pages of 64: names, match and insertion; and eviction of all of it."""
    draw = random.Random(0)
    tokens = [draw.randrange(129_280) for _ in range(100_000)]
    best = [1e9, 1e9, 1e9]
    for _ in range(5):
        pool = PagePool(1600, 64)
        cache = PrefixCache(pool)
        pages = cache.allocate(1563)
        times = [time.perf_counter()]
        keys = PageKeys(tokens, 64)
        stop = cache.keyed(keys, len(tokens))
        node = cache.insert(cache.match(keys, stop), keys, pages, stop)
        times.append(time.perf_counter())
        assert cache.match(keys, stop) is node
        cache.release(node, keys, pages, stop)
        times.append(time.perf_counter())
        cache.allocate(1600)
        times.append(time.perf_counter())
        best = [min(old, b - a) for old, (a, b) in zip(best, pairwise(times), strict=True)]
    assert best[0] < 0.03, "insertion"
    assert best[1] < 0.03, "match and release"
    assert best[2] < 0.03, "eviction"
