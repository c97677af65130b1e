"""The router's kernels choose exactly as their twin does, ties included, and never look at invalid tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import router
from nextn.kernels.ref import router as ref
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")  # hypothesis tests take no function-scoped fixture
V3: dict[str, Any] = {
    "scoring": "sigmoid",
    "method": "noaux_tc",
    "top_k": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scaling": 2.5,
}


def inputs(tokens: int, hidden: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose logits are of order 1."""
    x = torch.randn(tokens, hidden, device=WHERE).bfloat16()
    weight = (torch.randn(experts, hidden, device=WHERE) / hidden**0.5).to(dtype)
    return x, weight, torch.randn(experts, device=WHERE) / 4


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_close(actual[1], expected[1], "bitwise", what="experts")
    assert_close(actual[0], expected[0], "fp32-op", what="weights")


def test_it_equals_its_twin_for_every_kind_of_router() -> None:
    """Groups of no power of two too; hidden sizes that fill no block; several token blocks."""

    @settings(max_examples=15)
    @given(
        st.sampled_from(["sigmoid", "softmax"]),
        st.sampled_from([("noaux_tc", 4, 2), ("noaux_tc", 3, 2), ("noaux_tc", 1, 1), ("greedy", 4, 1),
                         ("group_limited_greedy", 3, 1), ("group_limited_greedy", 4, 4)]),
        st.sampled_from([(1, 32), (3, 130), (18, 48)]),
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.booleans(),
        st.integers(0, 99),
    )  # fmt: skip
    def check(scoring: Any, how: Any, size: Any, dtype: torch.dtype, norm: bool, seed: int) -> None:
        torch.manual_seed(seed)
        method, groups, kept = how
        x, weight, bias = inputs(*size, experts=24, dtype=dtype)
        valid = torch.rand(size[0], device=WHERE) < 0.8
        poison_(x[~valid])
        options = V3 | {
            "scoring": scoring, "method": method, "n_group": groups, "topk_group": kept,
            "norm_topk_prob": norm,
        }  # fmt: skip
        args = (x, weight, bias if method == "noaux_tc" else None, valid)
        assert_same(router.route_tokens(*args, **options), ref.route_tokens(*args, **options))

    check()


@pytest.mark.parametrize("method", ["noaux_tc", "greedy", "group_limited_greedy"])
def test_equal_experts_and_equal_groups_go_to_the_lower_number(method, device):
    weight = torch.ones(16, 32, device=device).bfloat16()
    x = torch.randn(2, 32, device=device).bfloat16()
    options = V3 | {"method": method}
    _, indices = router.route_tokens(x, weight, None, None, **options)
    assert indices.tolist() == [[0, 1, 2]] * 2
    weight[9] *= 2  # one better expert in the third group
    x = x.abs() / 32  # logits of order 1, where no score saturates
    _, indices = router.route_tokens(x, weight, None, None, **options)
    assert indices.tolist() == [[9, 0, 1]] * 2
    assert torch.equal(indices, ref.route_tokens(x, weight, None, None, **options)[1])


def test_negative_choices_of_kept_groups_beat_dropped_groups(device):
    x, weight, _ = inputs(3, 32, 16, torch.bfloat16)
    bias = torch.full((16,), -5.0, device=device)
    bias[4:8] = -2.0
    actual = router.route_tokens(x, weight, bias, None, **V3)
    assert_same(actual, ref.route_tokens(x, weight, bias, None, **V3))
    assert (actual[1] // 4 == 1).sum() == 9


@pytest.mark.parametrize("method", ["noaux_tc", "greedy", "group_limited_greedy"])
def test_an_expert_without_a_number_is_chosen_last(method, device):
    """NaN in one expert's weights costs that expert, and no token another."""
    x, weight, bias = inputs(4, 32, 16, torch.bfloat16)
    weight[6] = torch.nan
    options = V3 | {"method": method, "n_group": 4, "topk_group": 4, "top_k": 15}
    args = (x, weight, bias if method == "noaux_tc" else None, None)
    actual = router.route_tokens(*args, **options)
    assert_same(actual, ref.route_tokens(*args, **options))
    assert not (actual[1] == 6).any()
    assert actual[0].isfinite().all()


def test_float32_weights_keep_all_their_digits(device):
    """Weights that agree in their first 16 bits differ in the choice."""
    weight = torch.ones(16, 32, device=device)
    weight[13] += 2.0**-20
    x = torch.ones(1, 32, device=device).bfloat16()
    weights, indices = router.route_tokens(
        x, weight / 32, None, None, **V3 | {"method": "greedy", "top_k": 1}
    )
    assert indices.item() == 13
    assert weights.item() == pytest.approx(2.5)


def test_a_token_s_choice_does_not_depend_on_its_batch(device):
    x, weight, bias = inputs(20, 256, 16, torch.float32)
    together = router.route_tokens(x, weight, bias, None, **V3)
    for row in (0, 17):
        alone = router.route_tokens(x[row : row + 1], weight, bias, None, **V3)
        for one, many in zip(alone, together, strict=True):
            assert_close(one, many[row : row + 1], "bitwise")


@pytest.mark.parametrize("tokens", [70, 1025])
def test_long_inputs_use_larger_tiles(tokens, device):
    x, weight, bias = inputs(tokens, 64, 8, torch.bfloat16)
    options = V3 | {"n_group": 2, "topk_group": 1, "top_k": 2}
    config = router.choose_config(tokens, 64)
    assert config != router.choose_config(1, 64)
    # The interpreter runs one program a token; the first and last show what the tiles do.
    if not HAS_CUDA:
        x, config = torch.cat([x[:3], x[-3:]]), config._replace(block_tokens=16)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :64]  # rows further apart than they are long
    expected = ref.route_tokens(x, weight, bias, None, **options)
    assert_same(router.route_tokens(wide, weight, bias, None, **options, config=config), expected)


def test_no_tokens_and_unsupported_inputs(device):
    x, weight, bias = inputs(2, 32, 16, torch.bfloat16)
    weights, indices = router.route_tokens(x[:0], weight, bias, None, **V3)
    assert weights.shape == indices.shape == (0, 3)
    with pytest.raises(AssertionError, match="x must be bfloat16"):
        router.route_tokens(x.float(), weight, bias, None, **V3)
    with pytest.raises(AssertionError, match="16 experts are not 5 groups"):
        router.route_tokens(x, weight, bias, None, **V3 | {"n_group": 5})
    with pytest.raises(AssertionError, match="wanted of 4"):
        router.route_tokens(x, weight, bias, None, **V3 | {"topk_group": 1, "top_k": 5})
