"""The kernel between logits and choice keeps what its twin keeps, ties and all, whatever rows are mixed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

from nextn.kernels import adjust, ops
from nextn.kernels.adjust import AdjustConfig
from nextn.kernels.ref import sampling as ref
from nextn.kernels.ref.sampling import SamplingBatch
from tests.compare import assert_close
from tests.strategies import Knobs, SamplingCase, sampling_batch, sampling_cases


def check(
    logits: Tensor,
    batch: SamplingBatch,
    path: tuple[Tensor, Tensor],
    positions: Tensor,
    config: AdjustConfig | None = None,
) -> Tensor:
    """The kernel's and the twin's logits agree; returns the kernel's."""
    got = adjust.adjust_logits(logits, batch, path, positions, config=config)
    expected = ref.adjust_logits(logits, batch, *path, positions)
    assert_close(got.isfinite(), expected.isfinite(), "bitwise", what="support")
    assert_close(got, expected, "fp32-op")
    return got


@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))
@given(sampling_cases())
def test_small_vocabularies_with_every_option(case: SamplingCase) -> None:
    """Ties, NaN, infinities, every mixture of rows, masks, bans and biases."""
    path = (case.path_tokens, case.path_valid)
    check(case.logits.float(), case.batch, path, case.positions)


EVERYTHING = Knobs(
    0.8, top_k=60, top_p=0.9, min_p=0.001, frequency=0.3, presence=0.2, repetition=1.2,
    bias=((3, 4.0), (7, -2.0)), banned=(1, 5), ban_until=6,
)  # fmt: skip
ROWS = [
    EVERYTHING,
    Knobs(0.0, frequency=0.3, bias=((0, 2.0),)),
    Knobs(1.0, top_p=0.3),
    Knobs(1.3, top_k=17, ban_until=9, banned=(2,)),
    Knobs(0.7, min_p=0.2),
    Knobs(1.0),
]


@pytest.mark.parametrize("config", [None, AdjustConfig(128, 4, 32)])
@pytest.mark.parametrize(("vocab", "levels"), [(40, 5), (700, 8), (1024, 10**6), (1500, 3)])
def test_long_vocabularies_with_few_and_with_many_ties(
    vocab: int, levels: int, config: AdjustConfig | None
) -> None:
    """Logits of few different values tie at nearly every cut; the ids decide there.

    In one block or in several, and with fronts that fit the candidates and such that do not.
    """
    logits = torch.randint(0, levels, (len(ROWS), 2, vocab)) * (9.0 / levels)
    counts = torch.randint(0, 2, (len(ROWS), vocab)).int()
    words = torch.randint(-(2**31), 2**31, (len(ROWS), 2, -(-vocab // 32))).int()
    path = torch.randint(0, vocab, (len(ROWS), 2, 3))
    positions = torch.tensor([[5, 6]]).expand(len(ROWS), 2)
    for grammar in (None, words):
        batch = sampling_batch(ROWS, vocab, counts, torch.rand(len(ROWS), vocab) < 0.3, grammar)
        check(logits, batch, (path, path >= 2), positions, config)


@pytest.mark.parametrize(
    ("logits", "what"),
    [
        (torch.zeros(300), "one value"),
        (torch.cat((torch.tensor([1e37, -1e37]), torch.randn(298))), "a range that halving does not cross"),
        (torch.arange(300) * -1e-38, "values that nearly vanish"),
        (torch.cat((torch.full((299,), -math.inf), torch.zeros(1))), "a single token"),
    ],
)
def test_distributions_on_which_the_search_by_value_fails(logits: Tensor, what: str) -> None:
    """What stays is right whichever way it is found."""
    rows = [
        Knobs(1.0, top_k=20),
        Knobs(1.0, top_p=0.3),
        Knobs(1.0, top_k=200, top_p=0.4),
        Knobs(0.1, top_k=2),
    ]
    nothing = torch.zeros(len(rows), 1, 0, dtype=torch.int64)
    expanded = logits.expand(len(rows), 1, -1)
    positions = torch.zeros(len(rows), 1).long()
    got = check(
        expanded, sampling_batch(rows, 300), (nothing, nothing.bool()), positions, AdjustConfig(128, 4, 32)
    )
    assert got.isfinite().any(-1).all(), what


@pytest.mark.parametrize("config", [None, AdjustConfig(128, 4, 16)])
@pytest.mark.parametrize("top_p", [1e-50, 1e-6, 0.25, 0.5, 0.75, 0.9999])
def test_exact_sums_at_the_cut(top_p: float, config: AdjustConfig | None) -> None:
    """Equal tokens whose masses are powers of two: as many stay as the mass needs, but one at least."""
    batch = sampling_batch([Knobs(1.0, top_p=top_p)], 64)
    logits = torch.full((1, 1, 64), -math.inf)
    logits[..., ::4] = 1.0
    nothing = torch.zeros(1, 1, 0, dtype=torch.int64)
    got = check(logits, batch, (nothing, nothing.bool()), torch.zeros(1, 1).long(), config)
    assert int(got.isfinite().sum()) == max(math.ceil(torch.tensor(top_p).item() * 16), 1)
    assert got[0, 0, : int(got.isfinite().sum()) * 4 : 4].isfinite().all()


def test_a_node_does_not_depend_on_the_batch_or_on_unused_memory() -> None:
    """A row alone is bit for bit one of many; strided logits of which the gaps hold NaN."""
    vocab = 300
    wide = torch.full((len(ROWS), 2, vocab + 5), math.nan)
    logits = wide[..., :vocab]
    logits.copy_(3 * torch.randn(len(ROWS), 2, vocab))
    path = torch.zeros(len(ROWS), 2, 0, dtype=torch.int64)
    positions = torch.full((len(ROWS), 2), 5)
    whole = check(logits, sampling_batch(ROWS, vocab), (path, path.bool()), positions)
    for b, knobs in enumerate(ROWS):
        one, batch = slice(b, b + 1), sampling_batch([knobs], vocab)
        alone = adjust.adjust_logits(
            logits[one, 1:], batch, (path[one, 1:], path[one, 1:].bool()), positions[one, 1:]
        )
        assert_close(alone, whole[one, 1:], "bitwise", what=f"row {b}")


def test_what_the_kernel_cannot_run_is_refused() -> None:
    """With a sentence, at the wrapper."""
    batch = sampling_batch([EVERYTHING], 8)
    logits = torch.zeros(1, 1, 8)
    with pytest.raises(AssertionError, match="path"):
        adjust.adjust_logits(logits, batch, None, torch.zeros(1, 1))
    path = torch.zeros(1, 1, 0, dtype=torch.int64)
    with pytest.raises(AssertionError, match="position"):
        adjust.adjust_logits(logits, batch, (path, path.bool()))
    with pytest.raises(AssertionError, match="float64"):
        adjust.adjust_logits(logits.double(), batch)
    whole = ((path, path.bool()), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"grammar must be \[1, 1, 1\]"):
        adjust.adjust_logits(logits, replace(batch, grammar=torch.zeros(1, 2, 1, dtype=torch.int32)), *whole)
    with pytest.raises(AssertionError, match="2 words for 73 tokens"):
        adjust.adjust_logits(
            torch.zeros(1, 1, 73),
            replace(batch, grammar=torch.zeros(1, 1, 2, dtype=torch.int32), any_penalty=False),
            *whole,
        )


@pytest.mark.parametrize(
    "name",
    ["frequency", "presence", "repetition", "counts", "prompt_seen", "bias_values", "ban_until",
     "temperature", "top_k", "top_p", "min_p"],
)  # fmt: skip
@pytest.mark.parametrize("fault", ["strided", "dtype", "shape"])
def test_rows_values_of_another_layout_are_refused(name: str, fault: str) -> None:
    """The kernel takes no strides for them, and would read other rows' values."""
    batch = sampling_batch([EVERYTHING] * 2, 8)
    value: Tensor = getattr(batch, name)
    bad = {
        "strided": torch.stack((value, value), dim=-1)[..., 0],
        "dtype": value.to(torch.int16),
        "shape": value[:1],
    }[fault]
    path = torch.zeros(2, 1, 0, dtype=torch.int64)
    sentence = {"strided": "contiguous", "dtype": "is torch.int16", "shape": "must be"}[fault]
    with pytest.raises(AssertionError, match=f"{name} .*{sentence}"):
        adjust.adjust_logits(
            torch.zeros(2, 1, 8), replace(batch, **{name: bad}), (path, path.bool()), path.new_zeros(2, 1)
        )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bias_ids": (1, 513), "bias_values": (1, 513)}, "at most 512 biased ids"),
        ({"banned_ids": (1, 65)}, "at most 64 banned ids"),
    ],
)
def test_more_biases_than_the_kernel_takes_are_refused(
    fields: dict[str, tuple[int, int]], sentence: str
) -> None:
    """They would not be added."""
    batch = sampling_batch([Knobs(0.0, bias=((1, 1.0),), banned=(2,), ban_until=9)], 8)
    more = {name: torch.zeros(shape, dtype=getattr(batch, name).dtype) for name, shape in fields.items()}
    with pytest.raises(AssertionError, match=sentence):
        adjust.adjust_logits(
            torch.zeros(1, 1, 8), replace(batch, **more), None, torch.zeros(1, 1, dtype=torch.int64)
        )


@pytest.mark.parametrize(
    ("knobs", "tensors"), [(Knobs(1.0, frequency=0.5), 1), (Knobs(0.0, top_k=2), 1), (Knobs(1.0, top_k=2), 4)]
)
def test_only_filters_take_memory_beside_the_result(
    knobs: Knobs, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, places and masses serve rows that are sampled and filter."""
    made, empty = [], torch.empty

    def counted(*args: Any, **more: Any) -> Tensor:
        made.append(empty(*args, **more))
        return made[-1]

    path = torch.zeros(1, 1, 0, dtype=torch.int64)
    monkeypatch.setattr(torch, "empty", counted)
    adjust.adjust_logits(torch.zeros(1, 1, 8), sampling_batch([knobs], 8), (path, path.bool()))
    assert len(made) == tensors


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # numpy, as the interpreter
@pytest.mark.parametrize("knobs", [Knobs(top_k=39), Knobs(top_p=0.999), Knobs(min_p=1e-30), Knobs(top_k=50)])
def test_a_tiny_temperature_leaves_what_is_possible_under_it(knobs: Knobs) -> None:
    """Logits that it sends to -inf are as impossible as any, whichever filter is on."""
    temperatures = [1e-45, 1e-38, 1e-3]
    logits = torch.arange(40.0).flip(0).mul(10).expand(3, 1, 40)
    path = torch.zeros(3, 1, 0, dtype=torch.int64)
    batch = sampling_batch([replace(knobs, temperature=t) for t in temperatures], 40)
    got = check(logits, batch, (path, path.bool()), path.new_zeros(3, 1))
    assert got[:2, 0].isfinite().sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75])
def test_top_p_keeps_of_equal_tokens_as_many_as_their_shares_say(top_p: float) -> None:
    """Also where a share is no binary fraction, and shares would add up to a little less than they are."""
    sizes, vocab = range(1, 65), 70
    logits = torch.full((len(sizes), 1, vocab), -math.inf)
    for row, size in enumerate(sizes):
        logits[row, 0, :size] = 1.0
    path = torch.zeros(len(sizes), 1, 0, dtype=torch.int64)
    batch = sampling_batch([Knobs(1.0, top_p=top_p)] * len(sizes), vocab)
    got = check(logits, batch, (path, path.bool()), path.new_zeros(len(sizes), 1))
    assert got.isfinite().sum(-1).flatten().tolist() == [math.ceil(size * top_p) for size in sizes]


def test_min_p_keeps_what_lies_just_at_its_floor() -> None:
    """The floor is one number for the kernel and its twin: the logarithm, rounded once."""
    floors = torch.rand(64)
    logits = torch.stack((torch.zeros(64), floors.double().log().float(), torch.full((64,), -80.0)), dim=1)
    logits[1::2, 1] = logits[1::2, 1].nextafter(torch.tensor(-math.inf))
    path = torch.zeros(64, 1, 0, dtype=torch.int64)
    batch = sampling_batch([Knobs(1.0, min_p=floor) for floor in floors.tolist()], 3)
    got = check(logits.unsqueeze(1), batch, (path, path.bool()), path.new_zeros(64, 1))
    assert got[:, 0, 1].isfinite().tolist() == [True, False] * 32


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # numpy, as the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("knobs", [Knobs(0.0), Knobs(0.8), Knobs(0.8, top_k=5), Knobs(0.0, frequency=0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_strange_logit_spoils_no_other_token_s_log_probability(
    bad: float, raw: bool, knobs: Knobs, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is -inf and +inf the largest float, whether anything adjusts the logits or not, here and there."""
    logits = torch.linspace(-3, 3, 40).view(1, 1, 40).to(dtype)
    logits[0, 0, 7] = bad
    batch = replace(sampling_batch([knobs], 40), raw_logprobs=torch.tensor([raw]))
    path = torch.zeros(1, 1, 0, dtype=torch.int64)
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(ops, "on_gpu", lambda _, here=on_gpu: here)
        adjusted, _ = ops.adjust_logits(logits, batch, (path, path.bool()), path.new_zeros(1, 1))
        tokens = [torch.tensor([[token]]) for token in (7, 39)]
        found += [ops.chosen_logprobs(logits, adjusted, batch, each)[0] for each in tokens]
    strange, other = (float(own[0, 0, 0]) for own in found[:2])
    assert math.isfinite(strange) == (bad == math.inf)
    assert (other > -1e6) == (bad != math.inf)  # beside the largest float nothing has a chance
    for twin, kernel in zip(found[:2], found[2:], strict=True):
        assert_close(kernel, twin, "fp32-op")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_chosen_behind_the_kernel_is_what_the_twins_choose(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children, picks and log-probabilities as a GPU runs them; float64 is adjusted by plain torch."""
    vocab, rows = 120, len(ROWS)
    logits = (3 * torch.randn(rows, 3, vocab)).to(dtype)
    words = torch.randint(-(2**31), 2**31, (rows, 3, 4)).int()
    raw = torch.arange(rows) % 2 == 0
    batch = replace(sampling_batch(ROWS, vocab, grammar=words), raw_logprobs=raw)
    path = torch.randint(0, vocab, (rows, 3, 2))
    after = ((path, path > 9), torch.full((rows, 3), 5))
    noise = ref.level_noise(batch, torch.full((rows,), 5), 2, vocab, dtype)
    level = torch.tensor([[0, 1, 1]]).expand(rows, 3).contiguous()
    tokens, values = ref.best_children(logits, batch, noise[:, :1], 2, 1.0, *after)
    picked = ref.pick_tokens(logits, batch, noise, level, *after)
    adjusted = ref.adjust_logits(logits, batch, *after[0], after[1])
    logprobs, ids = ref.chosen_logprobs(logits, adjusted, batch, picked)

    monkeypatch.setattr(ops, "on_gpu", lambda _: True)
    kind = "fp32-op" if dtype == torch.float32 else "fp64"
    possible = values > -math.inf  # which impossible tokens fill up the children says nothing
    got, got_values = ops.best_children(logits, batch, noise[:, :1], 2, 1.0, *after)
    assert_close(got_values, values, kind)
    assert torch.equal(got[possible], tokens[possible])
    assert_close(ops.pick_tokens(logits, batch, noise, level, *after), picked, "bitwise")
    got_adjusted, rest = ops.adjust_logits(logits, batch, *after)
    assert not rest.adjusts_logits
    got_logprobs, got_ids = ops.chosen_logprobs(logits, got_adjusted, batch, picked)
    assert_close(got_logprobs, logprobs, "fp32-op")
    finite = logprobs > -math.inf
    assert torch.equal(got_ids[finite], ids[finite])
