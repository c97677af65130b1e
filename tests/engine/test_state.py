"""Device memory: slots follow the page table, and rows start with what their request has said."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.config import ModelConfig
from nextn.engine.request import SamplingParams
from nextn.engine.state import RowState
from tests.tiny import TINY


def _state(page_size: int = 4, num_pages: int = 8) -> RowState:
    cfg = ModelConfig.from_dict(TINY)
    sizes = {"max_rows": 2, "max_len": 20, "num_pages": num_pages, "page_size": page_size}
    return RowState(cfg, **sizes, dtype=torch.float32, device=torch.device("cpu"))


@given(st.permutations(range(8)), st.integers(1, 7))
def test_a_slot_is_the_page_of_a_position_and_its_offset(pages: list[int], page_size: int) -> None:
    """Any page order and size; positions past the table stay inside the cache."""
    state = _state(page_size)
    width = state.page_table.shape[1]
    state.set_pages(1, pages[:width])
    known = min(width, 8) * page_size
    positions = torch.arange(known + 5).unsqueeze(0)
    slots = state.slots(state.page_table[[1]], positions)[0].tolist()
    assert slots[:known] == [pages[p // page_size] * page_size + p % page_size for p in range(known)]
    assert all(0 <= slot < 8 * page_size for slot in slots)


def test_a_resumed_row_counts_what_it_said_and_a_new_one_starts_at_nothing() -> None:
    """Counts survive preemption through the output so far, and do not leak into the row's next request."""
    state = _state()
    penal = SamplingParams(frequency_penalty=0.5)
    state.set_row(0, penal, seed=1, choice=0, prompt=[3, 4, 4], output=[7, 7, 9])
    assert {i: int(c) for i, c in enumerate(state.sampling.counts[0]) if c} == {7: 2, 9: 1}
    assert state.sampling.prompt_seen[0].nonzero().flatten().tolist() == [3, 4]
    state.set_row(0, penal, seed=1, choice=0, prompt=[5], output=[])
    assert int(state.sampling.counts[0].sum()) == 0
    assert state.sampling.prompt_seen[0].nonzero().flatten().tolist() == [5]
