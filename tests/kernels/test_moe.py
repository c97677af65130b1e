"""The experts' kernels against their twin: every way of finding work, all kinds of weights, poison around."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from nextn.kernels import moe
from nextn.kernels.ref import moe as ref
from nextn.kernels.ref.gemm import FP8, Block, scale_shape
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts, silu_and_mul
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

HIDDEN, EXPERTS, TOP_K = 48, 6, 3


def weight(device: torch.device, *size: int, block: Block | None) -> tuple[Tensor, Tensor | None]:
    """Random weights with outputs of order 1: FP8 with scales, or bfloat16."""
    plain = torch.randn(*size, device=device) / size[-1] ** 0.5
    if block is None:
        return plain.bfloat16(), None
    scale = torch.rand(*size[:-2], *scale_shape(size[-2], size[-1], block), device=device) + 0.5
    return plain.to(FP8), scale


def layer(
    device: torch.device,
    width: int,
    block: Block | None = None,
    shared_width: int = 0,
    hidden: int = HIDDEN,
    shared_block: Block | None = None,
) -> tuple[ExpertWeights, SharedExperts | None]:
    """Experts, and shared experts of shared_width columns."""
    w13, scale13 = weight(device, EXPERTS, 2 * width, hidden, block=block)
    w2, scale2 = weight(device, EXPERTS, hidden, width, block=block)
    experts = ExpertWeights(w13, w2, scale13, scale2, block or (128, 128))
    if not shared_width:
        return experts, None
    s13, sscale13 = weight(device, 2 * shared_width, hidden, block=shared_block or block)
    s2, sscale2 = weight(device, hidden, shared_width, block=shared_block or block)
    return experts, SharedExperts(s13, s2, sscale13, sscale2)


def choice(device: torch.device, tokens: int, top_k: int = TOP_K, kept: float = 0.8) -> tuple[Tensor, Tensor]:
    """Weights and distinct experts of each token; some of the pairs, and all of one token, are none."""
    indices = torch.rand(tokens, EXPERTS, device=device).argsort(-1)[:, :top_k].contiguous()
    indices[torch.rand(tokens, top_k, device=device) > kept] = -1
    if tokens > 2:
        indices[1] = -1
    return torch.rand(tokens, top_k, device=device) + 0.5, indices


def tokens_of(indices: Tensor, hidden: int = HIDDEN) -> Tensor:
    """x [N, hidden]: NaN where a token has no expert at all."""
    x = torch.randn(indices.shape[0], hidden + 8, device=indices.device).bfloat16()[:, :hidden]
    poison_(x[(indices < 0).all(1)])
    return x


def assert_twin(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, shared: SharedExperts | None,
    config: moe.MoeConfig | None = None,
) -> Tensor:  # fmt: skip
    """Every summand of every pair that exists equals the twin's; returns the kernel's."""
    actual = moe.moe_summands(x, weights, indices, experts, shared, config=config)
    # In float32, so that nothing is rounded but what the kernels round: the activations.
    plain = ExpertWeights(*(_wide(t) if isinstance(t, Tensor) else t for t in experts))
    more = None if shared is None else SharedExperts(*(None if t is None else _wide(t) for t in shared))
    with mock.patch.object(ref, "silu_and_mul", lambda both: silu_and_mul(both).bfloat16().float()):
        expected = ref.moe_summands(x.float(), weights, indices, plain, more)
    assert actual.shape == expected.shape
    exists = torch.ones(actual.shape[:2], dtype=torch.bool, device=x.device)
    exists[: indices.shape[1]] = (indices >= 0).T
    exists[:, x.isnan().any(1)] = False
    assert_close(actual[exists].float(), expected[exists], "bf16-op", what="summands")
    return actual


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == FP8 else tensor.float()


SMALL = moe.MoeConfig(16, 16, 1, 4, 2, 32, 1, 4, 2)


@pytest.mark.parametrize(
    ("width", "splits", "repeats"), [(16, 1, 1), (16, 3, 2), (32, 2, 1), (24, 2, 2), (40, 1, 1), (72, 1, 1)]
)
@pytest.mark.parametrize("block", [None, (16, 16), (32, 16)])
def test_decode_equals_its_twin(width, splits, repeats, block, device):
    """One or two steps of w2 after summed splits, and walks along a wide one; sizes that fill no block."""
    experts, shared = layer(device, width, block, width)
    if block is None and width > 32:
        splits = 2
    weights, indices = choice(device, 5)
    config = SMALL._replace(gate_splits=splits, down_repeats=repeats)
    assert_twin(tokens_of(indices), weights, indices, experts, shared, config)


@pytest.mark.parametrize(("hidden", "splits"), [(256, 1), (256, 2), (256, 3), (256, 4), (384, 4), (48, 3)])
def test_a_split_without_columns_adds_nothing(hidden, splits, device):
    """Steps of 128 columns do not divide by any number of splits: the last one's may all lie beyond."""
    experts, shared = layer(device, 16, None, 16, hidden=hidden)
    weights, indices = choice(device, 3)
    assert_twin(
        tokens_of(indices, hidden), weights, indices, experts, shared, SMALL._replace(gate_splits=splits)
    )


@pytest.mark.parametrize("tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("width", [32, 64])
def test_any_number_of_tokens_under_the_chosen_config(tokens, width, device):
    """Work found by the programs themselves, and from the list."""
    experts, shared = layer(device, width, (32, 32), width)
    weights, indices = choice(device, tokens)
    assert_twin(tokens_of(indices), weights, indices, experts, shared)


def test_all_tokens_may_choose_the_same_experts(device):
    """An expert with more pairs than a block has."""
    experts, shared = layer(device, 16, None, 16)
    weights, indices = choice(device, 40, kept=1)
    indices[:] = torch.tensor([4, 0, 5], device=device)
    assert_twin(tokens_of(indices), weights, indices, experts, shared)


def test_more_pairs_than_one_pass_holds(device, monkeypatch):
    """The list in several passes, with the counts from a launch of their own."""
    monkeypatch.setattr(moe, "CHUNK", 32)
    experts, _ = layer(device, 16)
    weights, indices = choice(device, 45)
    assert_twin(tokens_of(indices), weights, indices, experts, None, SMALL)


@pytest.mark.parametrize("tokens", [3, 20])
def test_no_pair_at_all_runs_the_shared_experts_alone(tokens, device):
    experts, shared = layer(device, 16, None, 16)
    weights, indices = choice(device, tokens)
    x = tokens_of(indices.clamp(min=0))
    indices[:] = -1
    actual = assert_twin(x, weights, indices, experts, shared)
    assert actual[TOP_K:].isfinite().all()


@pytest.mark.parametrize(
    ("shared_width", "block", "shared_block", "parts"),
    [(64, None, None, 2), (64, (32, 32), None, 2), (48, None, None, 1), (64, (64, 64), None, 1),
     (64, None, (32, 32), 2), (16, (16, 16), None, 1)],
)  # fmt: skip
def test_shared_experts_of_any_width_and_kind(shared_width, block, shared_block, parts, device):
    """As parts of the experts' width in the same launches, or in launches of their own."""
    experts, shared = layer(device, 32, block, shared_width, shared_block=shared_block)
    if shared_block is not None:
        experts = experts._replace(block=shared_block)
    weights, indices = choice(device, 4)
    actual = assert_twin(tokens_of(indices), weights, indices, experts, shared)
    assert actual.shape[0] == TOP_K + parts


def test_one_of_the_matrices_may_be_plain(device):
    """w13 in FP8 and w2 in bfloat16."""
    fp8, _ = layer(device, 32, (32, 32))
    plain, _ = layer(device, 32)
    weights, indices = choice(device, 4)
    mixed = fp8._replace(w2=plain.w2, scale2=None)
    assert_twin(tokens_of(indices), weights, indices, mixed, None)


def test_long_inputs_match_the_twin(device):
    """More pairs than one program lists at once; one expert each keeps the interpreter's work small."""
    experts, _ = layer(device, 16)
    weights, indices = choice(device, 257, top_k=1)
    assert_twin(tokens_of(indices), weights, indices, experts, None)


def test_a_token_s_summands_do_not_depend_on_its_batch(device):
    experts, shared = layer(device, 32, (32, 32), 32)
    weights, indices = choice(device, 20, kept=1)
    x = tokens_of(indices)
    together = moe.moe_summands(x, weights, indices, experts, shared)
    for row in (0, 18):
        one = slice(row, row + 1)
        alone = moe.moe_summands(x[one], weights[one], indices[one], experts, shared)
        assert_close(alone, together[:, one], "bitwise")


def test_no_tokens_and_unsupported_inputs(device):
    experts, shared = layer(device, 32, (32, 32), 32)
    weights, indices = choice(device, 4)
    x = torch.zeros(4, HIDDEN, device=device).bfloat16()
    assert moe.moe_summands(x[:0], weights[:0], indices[:0], experts, shared).shape == (TOP_K + 1, 0, HIDDEN)
    with pytest.raises(AssertionError, match="x must be bfloat16"):
        moe.moe_summands(x.float(), weights, indices, experts, shared)
    with pytest.raises(AssertionError, match="w2 without scales must be bfloat16"):
        moe.moe_summands(x, weights, indices, experts._replace(scale2=None), shared)
    small, _ = layer(device, 32, (8, 8))
    with pytest.raises(AssertionError, match="multiple of 16 columns"):
        moe.moe_summands(x, weights, indices, small, None)
    wide, _ = layer(device, 80, (32, 32))
    with pytest.raises(AssertionError, match="few columns"):
        moe.moe_summands(x, weights, indices, wide, None, config=SMALL._replace(gate_splits=2))


@pytest.mark.skipif(HAS_CUDA, reason="the interpreter's check of addresses")
def test_nothing_is_read_for_pairs_without_expert(device):
    """With one expert in memory, any other number would be out of bounds."""
    experts, _ = layer(device, 16)
    one = ExpertWeights(experts.w13[:1].clone(), experts.w2[:1].clone(), None, None, experts.block)
    indices = torch.tensor([[-1, -1], [0, -1], [-1, 0]], device=device)
    assert_twin(tokens_of(indices), torch.ones(3, 2, device=device), indices, one, None)


@pytest.mark.parametrize(("top_k", "experts"), [(8, 256), (6, 64), (6, 160), (8, 384), (2, 8)])
def test_distinct_sizes_are_the_first_of_their_variants_however_many_are_asked_for(top_k, experts):
    """That they cover all others, test_launch_keys.py shows."""
    named = moe.distinct_sizes(top_k, experts, 5000)
    assert named == sorted(set(named))
    assert named[0] == 1
    for most in (1, 16, 100, 700):
        assert moe.distinct_sizes(top_k, experts, most) == [size for size in named if size <= most]
