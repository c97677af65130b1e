"""Host-side accounting of cache pages: who holds which page, how often, and what is free.

A page is `page_size` consecutive slots in every layer, target and NextN alike. Holds of a page are counted,
so that requests and the prefix cache can share it: one request fills it, from then on it is only read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nextn.errors import CapacityError


class PagePool:
    """Free list and reference counts of `num_pages` pages of `page_size` slots."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # The list is a stack: the page freed last is handed out first, while it is still in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How often a page is held."""
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` slots."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each held once; raises `CapacityError` and takes none if there are fewer."""
        if count > len(self._free):
            raise CapacityError(f"{count} cache pages are needed and {len(self._free)} are free")
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give back one hold of each page; a page that nobody holds any more is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} was released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the held pages are exactly those of `tables` and the rest is free.

        Several tables may name a page, each of them once.
        """
        tables = [tuple(table) for table in tables]
        assert all(len(set(table)) == len(table) for table in tables), "a table names a page twice"
        held = Counter(page for table in tables for page in table)
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            expected = held.get(page, 0)
            actual = self._references[page]
            assert actual == expected, f"page {page} is held {actual} times, but {expected} tables name it"
        assert len(self._free) + len(held) == self.num_pages, "free and held pages do not add up"
