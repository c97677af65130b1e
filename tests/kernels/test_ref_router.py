"""The router against the rule written for one token in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels.ref.router import Method, Scoring, route

V3: dict[str, Any] = {
    "scoring": "sigmoid",
    "method": "noaux_tc",
    "top_k": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scaling": 2.5,
}


def one_token(
    logits: list[float],
    bias: list[float],
    scoring: Scoring,
    method: Method,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> dict[int, float]:
    """Expert -> weight, from the rule as published; ties do not occur in random data."""
    if scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        total = sum(math.exp(z) for z in logits)
        scores = [math.exp(z) / total for z in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size, allowed = len(scores) // n_group, set(range(len(scores)))
    if method != "greedy":
        groups = [list(range(g * size, (g + 1) * size)) for g in range(n_group)]
        best = 2 if method == "noaux_tc" else 1
        groups.sort(key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:best]))
        allowed = {expert for group in groups[:topk_group] for expert in group}
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    norm = sum(scores[e] for e in chosen) if norm_topk_prob else 1.0
    return {expert: scores[expert] / norm * scaling for expert in chosen}


def as_dict(weights: Tensor, indices: Tensor) -> dict[int, float]:
    """One token's choice."""
    return dict(zip(indices.tolist(), weights.tolist(), strict=True))


@given(
    seed=st.integers(0, 10**6),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    method=st.sampled_from(["noaux_tc", "greedy", "group_limited_greedy"]),
    groups=st.sampled_from([(1, 1), (4, 2), (4, 4), (2, 1)]),
    norm=st.booleans(),
)
def test_it_is_the_published_rule(
    seed: int, scoring: Scoring, method: Method, groups: tuple[int, int], norm: bool
) -> None:
    """Same experts and weights for every scoring, method and grouping; biases may make choices negative."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 16, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(16, generator=generator, dtype=torch.float64) if method == "noaux_tc" else None
    options: dict[str, Any] = {
        "scoring": scoring, "method": method, "top_k": 3, "n_group": groups[0], "topk_group": groups[1],
        "norm_topk_prob": norm, "scaling": 2.5,
    }  # fmt: skip
    weights, indices = route(logits, bias, **options)
    for row in range(5):
        plain = [0.0] * 16 if bias is None else bias.tolist()
        expected = one_token(logits[row].tolist(), plain, **options)
        actual = as_dict(weights[row], indices[row])
        assert actual == pytest.approx(expected, rel=1e-12)


def test_negative_choices_do_not_let_other_groups_in() -> None:
    """With every score + bias below 0 a mask of 0 would choose from the dropped groups; -inf does not."""
    logits, bias = torch.zeros(1, 16), torch.full((16,), -3.0)
    bias[:8] = -2.0  # groups 0 and 1 are best
    _, indices = route(logits, bias, **V3)
    assert set(indices[0].tolist()) <= set(range(8))


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """A biased expert is chosen; its weight is its own score's share."""
    logits, bias = torch.zeros(1, 16), torch.zeros(16)
    bias[[1, 2, 3]] = 5.0
    weights, indices = route(logits, bias, **V3)
    assert as_dict(weights[0], indices[0]) == pytest.approx({1: 2.5 / 3, 2: 2.5 / 3, 3: 2.5 / 3})


def test_scores_that_vanish_give_finite_weights() -> None:
    """Sigmoids of -200 underflow to 0 in float32; the weights are 0 and not 0/0."""
    weights, _ = route(torch.full((2, 16), -200.0), torch.zeros(16), **V3)
    assert weights.eq(0).all()


def test_dtypes_and_shapes() -> None:
    """Weights keep the logits' dtype; a NaN row leaves the others alone and still names experts."""
    logits = torch.randn(3, 16)
    expected, _ = route(logits, torch.zeros(16), **V3)
    logits[1] = float("nan")
    weights, indices = route(logits, torch.zeros(16), **V3)
    assert weights.dtype == torch.float32
    assert indices.dtype == torch.int64
    assert weights.shape == indices.shape == (3, 3)
    assert torch.equal(weights[[0, 2]], expected[[0, 2]])
    assert ((indices >= 0) & (indices < 16)).all()
