"""The cache kernels change the slots they should, bit for bit as their twins, and no other byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import kv_cache, ops
from nextn.kernels.ref import kv_cache as ref
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")  # hypothesis tests take no function-scoped fixture
PAGE = 4


def cache_of(layers: int, pages: int, width: int, dtype: torch.dtype) -> Tensor:
    """[layers, pages, PAGE, width] without unused bits: random, but the last page holds NaN."""
    cache = torch.randn(layers, pages, PAGE, width, device=WHERE).to(dtype)
    poison_(cache[:, -1])
    return cache


def invalid_slots(slots: Tensor, valid: Tensor) -> Tensor:
    """The same slots with addresses that must not be used where not valid."""
    return torch.where(valid, slots, 2_147_480_000)


@st.composite
def paths(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]]]:
    """Accepted node numbers of 1 to 3 rows (ascending from 0, the last repeated as padding) and validity."""
    width = draw(st.integers(1, 5))
    nodes, valid = [], []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, width))
        path = [0, *sorted(draw(st.sets(st.integers(1, 7), min_size=width, max_size=width)))][:length]
        nodes.append(path + [path[-1] if path else 0] * (width - length))
        valid.append([i < length for i in range(width)])
    return nodes, valid


def test_compact_equals_loading_all_before_storing_any() -> None:
    """Paths such as 0, 2, 5 overlap their own targets; rows start anywhere, in pages of their own."""

    @given(paths(), st.sampled_from([20, 130]), st.integers(0, PAGE))
    def check(case: tuple[list[list[int]], list[list[bool]]], width: int, start: int) -> None:
        path, valid = torch.tensor(case[0], device=WHERE), torch.tensor(case[1], device=WHERE)
        rows, steps = path.shape
        pages = torch.arange(rows * 3, device=WHERE).view(rows, 3).flip(1)
        actual = cache_of(2, rows * 3 + 1, width, torch.float32)
        expected = actual.clone()

        def slots(position: Tensor) -> Tensor:
            return pages.gather(1, position // PAGE) * PAGE + position % PAGE

        source = slots(start + path)
        target = invalid_slots(slots(start + torch.arange(steps, device=WHERE).expand(rows, -1)), valid)
        flat, before = expected.flatten(1, 2), actual.flatten(1, 2)
        flat[:, target[valid]] = before[:, source[valid]]
        kv_cache.compact(actual, invalid_slots(source, valid), target, valid)
        assert_close(actual, expected, "bitwise")

    check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compact_equals_its_twin(dtype):
    """On a slice of the layers, as the target's cache is, with the slots of invalid entries out of range."""
    whole = cache_of(3, 5, 576, dtype)
    actual, expected = whole[:-1], whole.clone()[:-1]
    source = torch.tensor([[0, 2, 5], [9, 10, 9]], device=WHERE)
    valid = torch.tensor([[True, True, True], [True, True, False]], device=WHERE)
    target = invalid_slots(torch.tensor([[0, 1, 2], [8, 9, 10]], device=WHERE), valid)
    last = whole[-1].clone()
    kv_cache.compact(actual, source, target, valid)
    ref.compact(expected, source, target, valid)
    assert_close(actual, expected, "bitwise")
    assert_close(whole[-1], last, "bitwise", what="the layer outside the slice")


@pytest.mark.gpu
def test_compact_of_long_overlapping_paths_has_no_race():
    """64 nodes move one slot down, in many rows and layers: a store before its slot's load would show."""
    cache = torch.randn(16, 64 * 17, PAGE, 576, device=WHERE).bfloat16()
    rows = torch.arange(64, device=WHERE).unsqueeze(1) * 17 * PAGE
    target = rows + torch.arange(64, device=WHERE)
    expected = cache.clone()
    expected.flatten(1, 2)[:, target.flatten()] = cache.flatten(1, 2)[:, target.flatten() + 1]
    kv_cache.compact(cache, target + 1, target, torch.ones_like(target, dtype=torch.bool))
    assert_close(cache, expected, "bitwise")


def test_the_kernel_refuses_what_it_would_misread():
    cache, slots = cache_of(2, 3, 20, torch.float32), torch.zeros(1, 2, dtype=torch.int64, device=WHERE)
    yes = torch.ones(1, 2, dtype=torch.bool, device=WHERE)
    with pytest.raises(AssertionError, match="targets and valid"):
        kv_cache.compact(cache, slots, slots[:, :1], yes)
    with pytest.raises(AssertionError, match="slots must be int64"):
        kv_cache.compact(cache, slots.int(), slots, yes)
    with pytest.raises(AssertionError, match="valid must be bool"):
        kv_cache.compact(cache, slots, slots, yes.long())
    with pytest.raises(AssertionError, match="pages must follow"):
        kv_cache.compact(cache[:, :, :2], slots, slots, yes)


def test_ops_compact_is_the_kernel_on_a_gpu(monkeypatch):
    """The dispatching name does what the twin does, by the kernel."""
    called = []
    kernel = kv_cache.compact
    monkeypatch.setattr(ops, "on_gpu", lambda x: True)
    monkeypatch.setattr(kv_cache, "compact", lambda *args: called.append(kernel(*args)))
    actual = cache_of(2, 3, 20, torch.float32)
    expected = actual.clone()
    slots = torch.tensor([[1, 5]], device=WHERE)
    yes = torch.ones(1, 2, dtype=torch.bool, device=WHERE)
    ops.compact(actual, slots, slots - 1, yes)
    ref.compact(expected, slots, slots - 1, yes)
    assert len(called) == 1
    assert_close(actual, expected, "bitwise")
