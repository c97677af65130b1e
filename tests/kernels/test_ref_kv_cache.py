"""Cache writes and compaction against dictionaries of slots."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.kernels.ref.kv_cache import compact, write_latents
from tests.compare import assert_close

PAGES, PAGE_SIZE, WIDTH = 5, 4, 3
SLOTS = PAGES * PAGE_SIZE


@given(
    seed=st.integers(0, 999),
    valid=st.lists(st.booleans(), min_size=6, max_size=6),
    junk=st.sampled_from([-7, 0, 10**9]),
)
def test_exactly_the_valid_latents_are_written(seed: int, valid: list[bool], junk: int) -> None:
    """Invalid entries may hold NaN and slots of no page, or another entry's slot; no other byte changes."""
    torch.manual_seed(seed)
    cache, keep = torch.randn(PAGES, PAGE_SIZE, WIDTH), torch.tensor(valid)
    slots = torch.randperm(SLOTS)[:6]
    latents = torch.where(keep[:, None], torch.randn(6, WIDTH), float("nan"))
    expected = cache.flatten(0, 1).clone()
    expected[slots[keep]] = latents[keep]
    write_latents(cache, torch.where(keep, slots, junk), latents, keep)
    assert_close(cache.flatten(0, 1), expected, "bitwise")


def test_without_a_mask_everything_is_written() -> None:
    """valid None means all, also into a layer that is a view of the whole cache."""
    cache = torch.full((2, PAGES, PAGE_SIZE, WIDTH), float("nan"))
    latents, slots = torch.randn(3, WIDTH), torch.tensor([7, 0, 19])
    write_latents(cache[1], slots, latents)
    assert_close(cache[1].flatten(0, 1)[slots], latents, "bitwise")
    assert int(cache.isfinite().sum()) == 3 * WIDTH


@given(seed=st.integers(0, 999), data=st.data())
def test_compaction_loads_before_it_stores(seed: int, data: st.DataObject) -> None:
    """Accepted paths of two rows move to the front in every layer, although sources and targets overlap."""
    torch.manual_seed(seed)
    cache = torch.randn(3, PAGES, PAGE_SIZE, WIDTH)
    rows = torch.randperm(SLOTS)[:16].view(2, 8)  # slots of two rows' eight nodes
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2))
    nodes = torch.stack([torch.randperm(8)[:5].sort().values for _ in range(2)])
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    sources, targets = rows.gather(1, nodes), rows[:, :5].clone()
    expected, before = cache.flatten(1, 2).clone(), cache.flatten(1, 2).clone()
    expected[:, targets[valid]] = before[:, sources[valid]]
    junk = data.draw(st.sampled_from([-5, 3, 10**9]))
    compact(cache, torch.where(valid, sources, junk), torch.where(valid, targets, junk), valid)
    assert_close(cache.flatten(1, 2), expected, "bitwise")
