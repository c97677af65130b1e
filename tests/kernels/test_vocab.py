"""The vocabulary kernels choose their twins' tokens, with their values, whatever rows share a batch."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.errors import ConfigError
from nextn.kernels import vocab
from nextn.kernels.ref import sampling as ref
from nextn.kernels.ref.sampling import NO_TOKEN, SamplingBatch
from tests.compare import Kind, assert_close
from tests.conftest import HAS_CUDA
from tests.strategies import LOGITS, Knobs, sampling_batch

# numpy, which interprets the kernels, warns where an infinity is meant to come out.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
KINDS: dict[torch.dtype, Kind] = {torch.float64: "fp64", torch.float32: "fp32-op", torch.bfloat16: "fp32-op"}
SMALL = (16, 1)  # chunks of 16 tokens, so that small vocabularies have several
MIXED = [Knobs(0.0, seed=2), Knobs(0.7, seed=1), Knobs(0.05, seed=-9), Knobs(1.9, seed=1, choice=1)]


def batch_of(rows: list[Knobs], size: int) -> SamplingBatch:
    batch = sampling_batch(rows, size)
    tensors = [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)]
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in tensors})


def noise_of(batch: SamplingBatch, levels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Noise as a cycle has it, the rows that take none full of NaN."""
    first = torch.arange(batch.seed.shape[0], device=DEVICE) + 40
    noise = ref.level_noise(batch, first, levels, size, ref_dtype(dtype))
    if batch.any_sampled:
        noise[batch.temperature == 0] = math.nan
    return noise


def ref_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_children(
    logits: Tensor, batch: SamplingBatch, noise: Tensor | None, k: int, tau: float = 1.0, **config: Any
) -> None:
    tokens, values = vocab.best_children(logits, batch, noise, k, tau, **config)
    clean = None if noise is None else noise.nan_to_num(0.0)
    expected, expected_values = ref.best_children(logits, batch, clean, k, tau)
    assert_close(tokens, expected, "bitwise", what="tokens")
    assert_close(values, expected_values, KINDS[logits.dtype], what="values")


def check_picks(logits: Tensor, batch: SamplingBatch, noise: Tensor, level: Tensor, **config: Any) -> Tensor:
    picked = vocab.pick_tokens(logits, batch, noise, level, **config)
    assert_close(picked, ref.pick_tokens(logits, batch, noise.nan_to_num(0.0), level), "bitwise")
    return picked


@st.composite
def cases(draw: st.DrawFn, *more: float) -> tuple[Tensor, list[Knobs], int]:
    """Logits [B, M, V] that tie often, rows greedy and sampled, and how many children to choose."""
    rows = [
        Knobs(draw(st.sampled_from((0.0, 0.05, 0.7, 1.0, 1.9))), seed=draw(st.integers(-(2**63), 2**63 - 1)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    nodes, size = draw(st.integers(1, 2)), draw(st.sampled_from((1, 15, 16, 17, 40)))
    alphabet = draw(st.sampled_from((LOGITS, (math.nan, -math.inf), (1.0,), (*LOGITS, *more))))
    seed = draw(st.integers(0, 2**31))
    chosen = torch.randint(
        len(alphabet), (len(rows), nodes, size), generator=torch.Generator().manual_seed(seed)
    )
    dtype = draw(st.sampled_from(tuple(KINDS)))
    return (
        torch.tensor(alphabet, dtype=dtype)[chosen].to(DEVICE),
        rows,
        draw(st.sampled_from([k for k in (1, 2, 3, 5, 17) if k <= size])),
    )


@settings(max_examples=15)
@given(cases(), st.sampled_from((None, 1.0, 0.6, 1.7)))
def test_children_are_the_twins(case: tuple[Tensor, list[Knobs], int], tau: float | None) -> None:
    """Tokens and values, with ties, NaN, -inf and nodes without a finite logit; tau None: no noise."""
    logits, rows, k = case
    batch = batch_of(rows, logits.shape[2])
    noise = None if tau is None else noise_of(batch, 1, logits.shape[2], logits.dtype)
    check_children(logits, batch, noise, k, 1.0 if tau is None else tau, config=SMALL)


@settings(max_examples=15)
@given(cases(math.inf), st.integers(0, 2**31))
def test_picks_are_the_twins(case: tuple[Tensor, list[Knobs], int], seed: int) -> None:
    """Each node takes its own level's noise; no finite logit is `NO_TOKEN`."""
    logits, rows, _ = case
    batch = batch_of(rows, logits.shape[2])
    noise = noise_of(batch, 3, logits.shape[2], logits.dtype)
    level = torch.randint(3, logits.shape[:2], generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    picked = check_picks(logits, batch, noise, level, config=SMALL)
    nothing = (logits.isnan() | (logits == -math.inf)).all(-1)
    assert_close(picked == NO_TOKEN, nothing, "bitwise")


@pytest.mark.parametrize("size", [1, 512, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_chunks(size: int, dtype: torch.dtype) -> None:
    """Edges of chunks under the default configuration, noise as a slice of a cycle's."""
    batch = batch_of(MIXED, size)
    noise = noise_of(batch, 3, size, dtype)
    logits = 3 * torch.randn(4, 2, size, dtype=dtype, device=DEVICE)
    check_children(logits, batch, noise[:, 1:2], min(5, size), 0.8)
    check_picks(logits, batch, noise, torch.tensor([[0, 2]], device=DEVICE).expand(4, -1))


def test_most_children() -> None:
    batch = batch_of(MIXED[:2], 200)
    logits = torch.randn(2, 1, 200, device=DEVICE)
    check_children(logits, batch, noise_of(batch, 1, 200, torch.float32), 64, config=SMALL)


def test_a_node_does_not_depend_on_its_batch() -> None:
    """A row alone, or a node alone, is bit for bit one of many, greedy rows without the flag too."""
    logits = 3 * torch.randn(4, 3, 520, device=DEVICE)
    batch = batch_of(MIXED, 520)
    noise = noise_of(batch, 2, 520, torch.float32)
    level = torch.tensor([[0, 1, 1]], device=DEVICE).expand(4, -1)
    tokens, values = vocab.best_children(logits, batch, noise[:, :1], 4)
    picked = vocab.pick_tokens(logits, batch, noise, level)
    for row, node in ((0, 0), (1, 2), (2, 1), (3, 2)):
        one, part = slice(row, row + 1), slice(node, node + 1)
        alone = batch_of(MIXED[one], 520)
        own = noise[one] if alone.any_sampled else torch.zeros(1, 2, 1, device=DEVICE)
        single = vocab.best_children(logits[one, part], alone, own[:, :1], 4)
        assert_close(single[0], tokens[one, part], "bitwise")
        assert_close(single[1], values[one, part], "bitwise")
        choice = vocab.pick_tokens(logits[one, part], alone, own, level[one, part])
        assert_close(choice, picked[one, part], "bitwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-3, 1.0, 100.0])
def test_strange_logits(temperature: float, dtype: torch.dtype) -> None:
    """-inf and NaN never win, +inf does, equal logits far apart are told apart by the noise alone."""
    largest = torch.finfo(dtype).max
    rows = [
        [math.nan, 3.0, -math.inf],
        [1.0, math.inf, math.nan],
        [largest, -largest, 0.0],
        [-math.inf, math.nan, -math.inf],
    ]
    logits = torch.full((1, 4, 60), -math.inf, dtype=dtype, device=DEVICE)
    logits[0, :, 20:23] = torch.tensor(rows, dtype=dtype)
    batch = batch_of([Knobs(temperature, seed=7)], 60)
    noise = noise_of(batch, 1, 60, dtype)
    level = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    picked = check_picks(logits, batch, noise, level, config=SMALL)
    assert picked.tolist() == [[21, 21, 20, NO_TOKEN]]
    check_children(logits, batch, noise, 4, config=SMALL)
    equal = torch.full_like(logits[:, :1], 2.0)
    check_picks(equal, batch, noise, level[:, :1], config=SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_level_noise_equals_its_twin(dtype: torch.dtype) -> None:
    """Noise of consecutive positions, zeros in greedy rows, [B, L, 1] without sampled ones."""
    first = torch.tensor([3, 163_839, 2**31 - 2, 0], device=DEVICE)
    for rows in (MIXED, [Knobs(0.0)] * 4):
        batch = batch_of(rows, 1030)
        actual = vocab.level_noise(batch, first, 3, 1030, dtype)
        assert_close(actual, ref.level_noise(batch, first, 3, 1030, dtype), KINDS[dtype])
    assert actual.shape == (4, 3, 1)


def test_no_rows_give_no_rows() -> None:
    batch, none = batch_of([], 9), torch.zeros(0, 2, 9, device=DEVICE)
    assert vocab.best_children(none, batch, None, 3)[0].shape == (0, 2, 3)
    level = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    assert vocab.pick_tokens(none, batch, none, level).shape == (0, 2)


def test_refusals_say_what_is_wrong() -> None:
    batch, logits = batch_of([Knobs(1.0)], 3), torch.zeros(1, 1, 3, device=DEVICE)
    with pytest.raises(ConfigError, match="--topk 4"):
        vocab.best_children(logits, batch, None, 4)
    with pytest.raises(AssertionError, match=r"noise must be torch\.float32"):
        vocab.best_children(logits, batch, logits.double(), 1)
    with pytest.raises(AssertionError, match="filters, penalties"):
        vocab.best_children(logits, batch_of([Knobs(1.0, top_k=2)], 3), logits, 1)
    with pytest.raises(AssertionError, match="level must be"):
        vocab.pick_tokens(logits, batch, logits, logits[..., 0])
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for name in ("seed", "choice"):
        with pytest.raises(AssertionError, match=rf"{name} must be \[1\], is \[2\]"):
            vocab.level_noise(replace(batch, **{name: first.expand(2)}), first, 1, 3, torch.float32)
        with pytest.raises(AssertionError, match=f"{name} must be int64, is torch.int32"):
            vocab.level_noise(replace(batch, **{name: first.int()}), first, 1, 3, torch.float32)
    with pytest.raises(AssertionError, match=r"temperature must be \[2\]"):
        vocab.level_noise(batch, first.expand(2), 1, 3, torch.float32)
    with pytest.raises(AssertionError, match="penalties count each node's path"):
        ref.pick_tokens(logits, batch_of([Knobs(1.0, presence=1.0)], 3), logits, logits[..., 0].long())


def test_more_children_than_the_kernel_takes_run_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give what it would: the k best in order, on a GPU too."""
    from nextn.kernels import ops

    monkeypatch.setattr(ops, "on_gpu", lambda _: True)
    logits = torch.randn(1, 1, 200, device=DEVICE)
    batch = batch_of([Knobs(0.0)], 200)
    count = ops.MAX_CHILDREN + 1
    tokens, _ = ops.best_children(logits, batch, None, count)
    assert tokens[0, 0].tolist() == logits[0, 0].topk(count).indices.tolist()
