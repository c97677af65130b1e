"""Router and experts on a CUDA device at DeepSeek-V3's sizes, one of eight ranks, against the plain twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nextn.kernels import moe, router
from nextn.kernels.ref import moe as ref_moe
from nextn.kernels.ref import router as ref_router
from nextn.kernels.ref.gemm import FP8, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts
from tests.compare import assert_close

pytestmark = pytest.mark.gpu
HIDDEN, EXPERTS, WIDTH, TOP_K, BLOCK = 7168, 256, 256, 8, (128, 128)
V3: dict[str, Any] = {
    "scoring": "sigmoid",
    "method": "noaux_tc",
    "top_k": TOP_K,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "scaling": 2.5,
}


def fp8(*size: int) -> tuple[Tensor, Tensor]:
    """Random weights whose products are of order 1, filled one matrix at a time."""
    weight = torch.empty(size, dtype=FP8, device="cuda")
    for matrix in weight.view(-1, *size[-2:]):
        matrix.copy_(torch.randn(size[-2:], device="cuda"))
    scale = (torch.rand(*size[:-2], *scale_shape(size[-2], size[-1], BLOCK), device="cuda") + 0.5) / size[
        -1
    ] ** 0.5
    return weight, scale


def layer(width: int, experts: int = EXPERTS) -> tuple[ExpertWeights, SharedExperts]:
    """Experts and one shared expert."""
    w13, scale13 = fp8(experts, 2 * width, HIDDEN)
    w2, scale2 = fp8(experts, HIDDEN, width)
    (s13, sscale13), (s2, sscale2) = fp8(2 * width, HIDDEN), fp8(HIDDEN, width)
    return ExpertWeights(w13, w2, scale13, scale2, BLOCK), SharedExperts(s13, s2, sscale13, sscale2)


def choice(tokens: int, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Weights and distinct experts of each token; the last of several tokens has none."""
    indices = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :TOP_K].contiguous()
    if tokens > 1:
        indices[-1] = -1
    return torch.rand(tokens, TOP_K, device="cuda") + 0.5, indices


def assert_twin(x: Tensor, weights: Tensor, indices: Tensor, layer: Any, actual: Tensor) -> None:
    expected = ref_moe.moe_summands(x, weights, indices, *layer)
    exists = torch.ones(actual.shape[:2], dtype=torch.bool, device="cuda")
    exists[:TOP_K] = (indices >= 0).T
    # The twin rounds to bfloat16 in between, which a few of many elements show beyond an element's bound, and
    # some rows beyond that of all together.
    error = (actual[exists].double() - expected[exists].double()).square().mean(-1)
    size = expected[exists].double().square().mean(-1)
    assert error.mean().sqrt() < 2.0**-7 * size.mean().sqrt()
    assert (error.sqrt() < 2.0**-6 * size.sqrt()).all()
    assert actual[exists].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 64, 200, 1000])
def test_experts_of_one_rank(tokens: int) -> None:
    weights_of = layer(WIDTH)
    weights, indices = choice(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    assert_twin(x, weights, indices, weights_of, moe.moe_summands(x, weights, indices, *weights_of))


@pytest.mark.parametrize("tokens", [2, 40, 600])
def test_whole_experts(tokens: int) -> None:
    weights_of = layer(2048, experts=16)
    weights, indices = choice(tokens, experts=16)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    assert_twin(x, weights, indices, weights_of, moe.moe_summands(x, weights, indices, *weights_of))


@pytest.mark.parametrize("tokens", [5, 64, 300])
def test_a_captured_graph_follows_new_choices_and_repeats_its_bits(tokens: int) -> None:
    """Router and experts in one graph; other tokens choose other experts; batches do not change a token."""
    weights_of = layer(WIDTH)
    gate = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    bias = torch.randn(EXPERTS, device="cuda") / 10
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")

    def step() -> tuple[Tensor, Tensor, Tensor]:
        weights, indices = router.route_tokens(x, gate, bias, valid, **V3)
        return weights, indices, moe.moe_summands(x, weights, indices, *weights_of)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        valid.copy_(torch.rand(tokens, device="cuda") < 0.8)
        graph.replay()
        weights, indices, summands = (tensor.clone() for tensor in captured)
        expected = ref_router.route_tokens(x, gate, bias, valid, **V3)
        # Logits differ in their last bits between the two, so a near-tie may go the other way.
        same = (indices.sort(-1).values == expected[1].sort(-1).values).all(-1)
        assert same.float().mean() > 0.99 or (~same).sum() <= 1
        assert (indices[~valid] == -1).all()
        assert_twin(x, weights, indices, weights_of, summands)
        exists = (indices >= 0).T
        graph.replay()
        assert_close(captured[2][:TOP_K][exists], summands[:TOP_K][exists], "bitwise")
    if tokens <= moe.DECODE_TOKENS:
        one = moe.moe_summands(x[2:3], weights[2:3], indices[2:3], *weights_of)
        exists = (indices[2] >= 0).tolist()
        for j in range(TOP_K):
            if exists[j]:
                assert_close(one[j, 0], summands[j, 2], "bitwise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 33, 64, 500, 3000])
def test_router_weights_and_ties(tokens: int, dtype: torch.dtype) -> None:
    """Integer-valued inputs make logits exact, hence many exact ties, which both must break alike."""
    x = torch.randint(-1, 2, (tokens, HIDDEN), device="cuda").bfloat16()
    gate = torch.zeros(EXPERTS, HIDDEN, device="cuda")
    gate[:, :8] = torch.randint(-1, 2, (EXPERTS, 8), device="cuda").float() / 4
    actual = router.route_tokens(x, gate.to(dtype), None, None, **V3)
    expected = ref_router.route_tokens(x, gate.to(dtype), None, None, **V3)
    assert_close(actual[1], expected[1], "bitwise")
    assert_close(actual[0], expected[0], "fp32-op")
