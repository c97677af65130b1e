"""The Gate module: dtypes and what a hook sees; the rule itself is tested with the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nextn.config import ModelConfig
from nextn.models.moe import Gate
from nextn.models.parallel import Placement
from tests.compare import assert_close
from tests.models.build import CPU, build, load_state, prefill, random_state, random_tokens, small_dict


def gate(dtype: torch.dtype, **changes: Any) -> tuple[Gate, dict[str, Tensor]]:
    """A random router."""
    module = Gate(ModelConfig.from_dict(small_dict(**changes)), "gate", Placement(dtype, CPU))
    state = random_state(module.specs())
    load_state(module.specs(), state)
    return module, state


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_router_computes_wide(dtype: torch.dtype, wide: torch.dtype) -> None:
    """bfloat16 inputs meet float32 weights: scores are those of the widened input."""
    module, state = gate(dtype)
    x = torch.randn(4, 64).to(dtype)
    weights, indices = module(x)
    assert weights.dtype == module.weight.dtype == wide
    assert module.e_score_correction_bias is not None
    assert module.e_score_correction_bias.dtype == wide
    scores = (x.double() @ state["gate.weight"].double().T).sigmoid().gather(1, indices)
    expected = scores / scores.sum(-1, keepdim=True) * 2.5
    assert_close(weights, expected.to(wide), "fp32-op" if wide == torch.float32 else "fp64")


def test_only_noaux_tc_has_a_bias() -> None:
    """Greedy routers list no e_score_correction_bias, noaux_tc ones do."""
    names = [
        {spec.name for spec in gate(torch.float32, topk_method=method)[0].specs()}
        for method in ("greedy", "noaux_tc")
    ]
    assert names == [{"gate.weight"}, {"gate.weight", "gate.e_score_correction_bias"}]


def test_a_hook_sees_every_choice() -> None:
    """A forward hook on each Gate gets (weights, indices) of all tokens."""
    tiny, seen = build(small_dict(num_hidden_layers=3)), []
    for module in tiny.target.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[1].shape))
    prefill(tiny, tiny.pool(), [random_tokens(tiny, 5)], [0])
    assert seen == [(5, 3), (5, 3)]
