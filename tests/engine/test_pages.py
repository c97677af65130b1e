"""Pages: nothing is lost, and nothing held twice by mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.engine.pages import PagePool
from nextn.errors import CapacityError


def test_allocation_beyond_the_pool_takes_nothing() -> None:
    """A refused allocation leaves the pool as it was."""
    pool = PagePool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(CapacityError, match="2 cache pages are needed and 1 are free"):
        pool.allocate(2)
    assert pool.free == 1
    pool.check_integrity([held])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_any_history_of_sharing_adds_up(history: list[tuple[str, int]]) -> None:
    """Free and held pages are always all pages, and a page is held as often as tables name it."""
    pool = PagePool(12, 4)
    tables: list[list[int]] = []
    for action, value in history:
        if action == "allocate" and value <= pool.free:
            tables.append(pool.allocate(value))
        elif action == "share" and tables:
            table = list(tables[value % len(tables)])
            pool.share(table)
            tables.append(table)
        elif action == "release" and tables:
            pool.release(tables.pop(value % len(tables)))
        pool.check_integrity(tables)
        for page in range(12):
            assert pool.references(page) == sum(page in table for table in tables)


def test_a_page_twice_in_one_table_is_caught() -> None:
    """A request may share a page with others, never with itself."""
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.check_integrity([pages, pages])
    with pytest.raises(AssertionError, match="names a page twice"):
        pool.check_integrity([pages * 2])


def test_a_page_released_twice_is_caught() -> None:
    """A double release is an error, not a page that two requests get."""
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
