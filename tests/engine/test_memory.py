"""The memory plan: its parts add up to what --mem-fraction allows, and it says how many tokens fit."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.config import EngineConfig, ModelConfig
from nextn.engine.memory import GIB, _row_bytes, plan_memory, tokens_each
from nextn.engine.pages import PagePool
from nextn.engine.request import Request, SamplingParams
from nextn.engine.scheduler import Scheduler
from nextn.engine.state import RowState
from nextn.errors import CapacityError, ConfigError
from tests.memory_peaks import peaks
from tests.tiny import TINY

V3 = ModelConfig.from_dict(json.loads((Path(__file__).parents[1] / "data" / "dsv3-full.json").read_text()))
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """140 GiB, of which 84 hold weights, 0.5 are torch's own to reuse, and 4.5 somebody else's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (51 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 84 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(84.5 * GIB))
    caplog.set_level("INFO")


def _parts(text: str) -> dict[str, float]:
    """GiB by name."""
    return {name: float(size) for name, size in re.findall(r"^  (\w.*?) +([\d.]+) GiB", text, re.MULTILINE)}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fraction", [0.75, 0.85, 1.0])
def test_all_parts_together_are_what_the_fraction_allows(
    fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is forgotten: weights, others, rows, both kinds of step, graphs, cache and what is left."""
    plan = plan_memory(V3, EngineConfig(mem_fraction=fraction), GPU, torch.bfloat16, 163_840)
    parts = _parts(caplog.text)
    assert list(parts) == [
        "weights", "other", "rows", "prefill step", "decode step", "CUDA graphs", "cache", "unused",
    ]  # fmt: skip
    assert (parts["weights"], parts["other"]) == (84.0, 4.5)
    assert sum(parts.values()) == pytest.approx(140 * fraction, abs=0.05)
    assert parts["unused"] < 0.01
    assert f"{plan.num_pages * 64} tokens fit: one request of up to {plan.max_model_len}" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_short_requests_cannot_use_is_for_the_prefix_cache(
    prefix_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one the rest of the memory stays unused."""
    config = EngineConfig(max_running_requests=2, prefix_cache=prefix_cache)
    plan_memory(V3, config, GPU, torch.bfloat16, 4096)
    assert (_parts(caplog.text)["unused"] > 20) != prefix_cache


@pytest.mark.usefixtures("gpu")
def test_pages_that_were_asked_for_may_go_beyond_the_fraction_and_the_plan_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """--num-pages overrules --mem-fraction."""
    assert plan_memory(V3, EngineConfig(num_pages=8000), GPU, torch.bfloat16, 4096).num_pages == 8000
    parts = _parts(caplog.text)
    assert "unused" not in parts
    assert sum(parts.values()) - 2 * parts["too much"] == pytest.approx(140 * 0.85, abs=0.05)


@pytest.mark.usefixtures("gpu")
def test_a_fraction_that_is_taken_already_is_refused() -> None:
    """With the flags that would help, and the longest request that would fit."""
    with pytest.raises(CapacityError, match="--mem-fraction or --num-pages"):
        plan_memory(V3, EngineConfig(mem_fraction=0.6), GPU, torch.bfloat16, 4096)
    config = EngineConfig(num_pages=10, max_model_len=163_840)
    with pytest.raises(ConfigError, match=r"--max-model-len 163840 .* use at most 636$"):
        plan_memory(V3, config, GPU, torch.bfloat16, 163_840)


def test_on_a_cpu_the_cache_has_its_fixed_size(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody counts the rest of the machine's memory."""
    caplog.set_level("INFO")
    plan_memory(V3, EngineConfig(), torch.device("cpu"), torch.float32, 163_840)
    parts = _parts(caplog.text)
    assert list(parts) == ["rows", "prefill step", "decode step", "cache"]
    assert parts["cache"] == pytest.approx(1.0, abs=0.01)
    assert "max_model_len is cut" in caplog.text


def test_what_a_step_s_tensors_take_is_planned_and_not_much_more() -> None:
    """At real sizes, as a GPU would allocate: prompts long, short and many, trees, chains, every option."""
    pytest.importorskip("triton")
    found = peaks()
    assert {name: each for name, each in found.items() if not each[0] <= each[1] <= 3 * each[0]} == {}


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("max_model_len", [100, 163_840])
def test_rows_take_what_is_planned(rows: int, max_model_len: int) -> None:
    """Every tensor of the engine's state but the cache."""
    cfg, config = ModelConfig.from_dict(TINY), EngineConfig(max_running_requests=rows)
    state = RowState(
        cfg, max_rows=rows, max_len=max_model_len + 2 * config.largest_tree, num_pages=1,
        page_size=config.page_size, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    sampling = [getattr(state.sampling, field.name) for field in fields(state.sampling)]
    held = [each for each in (*vars(state).values(), *sampling) if isinstance(each, torch.Tensor)]
    taken = sum(each.nbytes for each in held) - state.cache.nbytes
    planned = _row_bytes(cfg, config, torch.bfloat16, max_model_len)
    assert 0.5 * planned <= taken <= planned


@given(pages=st.integers(1, 3000), rows=st.integers(1, 40), page_size=st.sampled_from([1, 4, 64]))
def test_as_many_requests_of_the_promised_length_are_admitted_together(
    pages: int, rows: int, page_size: int
) -> None:
    """The plan's last line is what the scheduler does."""
    config = EngineConfig(max_running_requests=rows, page_size=page_size)
    length = tokens_each(pages, config)
    scheduler = Scheduler(PagePool(pages, page_size), rows, 2048, config.largest_tree, prefix_cache=False)
    for number in range(rows if length else 0):
        scheduler.add(Request(str(number), [number] * length, SamplingParams()))
    for _ in range(rows):  # one step starts few long ones
        scheduler.next_batch()
    assert scheduler.num_preemptions == 0
    assert len(scheduler.running) == (rows if length else 0)
