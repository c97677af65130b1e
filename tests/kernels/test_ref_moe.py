"""Routed experts: both ways of running them against a sum over each token's experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels.ref.gemm import FP8, dequantize
from nextn.kernels.ref.moe import (
    GATHERED_PAIRS,
    ExpertWeights,
    gather_experts,
    loop_over_experts,
    routed_experts,
    silu_and_mul,
)
from tests.compare import Kind, assert_close

Run = Callable[[Tensor, Tensor, Tensor, ExpertWeights, Tensor | None], Tensor]
RUNS: dict[str, Run] = {"loop": loop_over_experts, "gather": gather_experts}
EXPERTS, HIDDEN, WIDTH = 6, 10, 4


def random_experts(dtype: torch.dtype) -> ExpertWeights:
    """Experts of a small layer."""
    w13, w2 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    return ExpertWeights(w13.to(dtype), w2.to(dtype), None, None, (128, 128))


def random_choice(tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Weights and distinct experts of each token."""
    weights = torch.rand(tokens, top_k).to(dtype)
    order = torch.rand(tokens, EXPERTS).argsort(-1)
    return weights, order[:, :top_k].contiguous()


def by_token(x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights) -> Tensor:
    """The definition, one token and one expert at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, token in enumerate(x.double()):
        for weight, expert in zip(weights[row].tolist(), indices[row].tolist(), strict=True):
            gate, up = (experts.w13[expert].double() @ token).chunk(2)
            out[row] += weight * (experts.w2[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float64, "fp64"), (torch.float32, "fp32-op"), (torch.bfloat16, "bf16-op")]
)
@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_it_is_the_weighted_sum(run: str, dtype: torch.dtype, kind: Kind, tokens: int) -> None:
    """One token, few and more pairs than are gathered at once; the result has x's dtype."""
    experts, x = random_experts(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    weights, indices = random_choice(tokens, 3, torch.float64 if dtype == torch.float64 else torch.float32)
    assert tokens < 33 or tokens * 3 > GATHERED_PAIRS
    actual = RUNS[run](x, weights, indices, experts, None)
    assert actual.dtype == dtype
    if dtype == torch.bfloat16:
        # The activation is rounded once more between the two products.
        error = (actual.double() - by_token(x, weights, indices, experts)).abs().max()
        assert error < 2.0**-5 * actual.double().square().mean().sqrt()
    else:
        assert_close(actual, by_token(x, weights, indices, experts).to(dtype), kind)


@given(
    seed=st.integers(0, 999),
    valid=st.lists(st.booleans(), min_size=5, max_size=5),
    run=st.sampled_from(list(RUNS)),
)
def test_invalid_tokens_run_no_expert(seed: int, valid: list[bool], run: str) -> None:
    """Poisoned experts that only invalid tokens chose are never read; those tokens get zeros."""
    torch.manual_seed(seed)
    experts, x = random_experts(torch.float64), torch.randn(5, HIDDEN, dtype=torch.float64)
    weights, indices = random_choice(5, 2, torch.float64)
    keep = torch.tensor(valid)
    expected = by_token(x, weights, indices, experts) * keep[:, None]
    used = indices[keep].unique()
    idle = torch.ones(EXPERTS, dtype=torch.bool)
    idle[used] = False
    if any(valid):
        experts.w13[idle] = float("nan")
        experts.w2[idle] = float("nan")
    masked = torch.where(keep[:, None], weights, 0)
    assert_close(RUNS[run](x, masked, indices, experts, keep), expected, "fp64")


def test_weights_of_invalid_tokens_do_not_matter() -> None:
    """routed_experts itself drops what the router gave to invalid tokens, NaN included."""
    experts, x = random_experts(torch.float32), torch.randn(3, HIDDEN)
    weights, indices = random_choice(3, 2)
    weights[1] = float("nan")
    out = routed_experts(x, weights, indices, experts, torch.tensor([True, False, True]), host=False)
    assert out[1].eq(0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("run", RUNS)
def test_fp8_experts_are_their_dequantised_selves(run: str) -> None:
    """Scales belong to the expert and to the block within gate and up halves."""
    hidden, width, block = 130, 128, (128, 128)
    w13, w2 = torch.randn(3, 2 * width, hidden).to(FP8), torch.randn(3, hidden, width).to(FP8)
    s13, s2 = torch.rand(3, 2, 2) * 0.1, torch.rand(3, 2, 1) * 0.1
    plain = [dequantize(w, s, block, torch.float32) for w, s in ((w13, s13), (w2, s2))]
    x, weights, indices = (
        torch.randn(4, hidden),
        torch.rand(4, 2),
        torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0]]),
    )
    actual = RUNS[run](x, weights, indices, ExpertWeights(w13, w2, s13, s2, block), None)
    expected = RUNS[run](x, weights, indices, ExpertWeights(plain[0], plain[1], None, None, block), None)
    assert_close(actual, expected, "bitwise")


def test_no_tokens() -> None:
    """An empty prefill is an empty result."""
    experts = random_experts(torch.float32)
    out = loop_over_experts(
        torch.zeros(0, HIDDEN), torch.zeros(0, 2), torch.zeros(0, 2).long(), experts, None
    )
    assert out.shape == (0, HIDDEN)


def test_silu_and_mul_takes_the_gate_first() -> None:
    """silu(gate) * up with the gate in the first half."""
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    expected = torch.tensor([[3 / (1 + torch.e**-1), -8 / (1 + torch.e**2)]])
    assert_close(silu_and_mul(x), expected, "fp32-op")
