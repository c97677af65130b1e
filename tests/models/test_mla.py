"""One attention layer: naive and absorbed forms, its cache entries, and its weights' two storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nextn.config import ModelConfig
from nextn.models.mla import LATENT_NORM_EPS, MLA, Rotary, plan_decode, plan_prefill
from nextn.models.parallel import Placement
from tests.compare import assert_close
from tests.models.build import CPU, Pool, Tree, load_state, random_state, small_dict


def layer(
    dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[ModelConfig, MLA, Rotary, dict[str, Tensor]]:
    """An attention layer with random weights."""
    cfg = ModelConfig.from_dict(small_dict(**changes))
    place = Placement(dtype, CPU)
    mla = MLA(cfg, "attn", place)
    state = random_state(mla.specs())
    load_state(mla.specs(), state)
    return cfg, mla, Rotary(cfg, 256, place), state


def pool_of(cfg: ModelConfig, dtype: torch.dtype = torch.float64) -> Pool:
    """One layer's cache."""
    return Pool(torch.full((1, 24, 4, cfg.latent_dim), float("nan"), dtype=dtype), seed=1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """A norm with the latents' epsilon."""
    return x / (x.square().mean(-1, keepdim=True) + LATENT_NORM_EPS).sqrt() * weight


def turn(x: Tensor, cfg: ModelConfig) -> Tensor:
    """Plain rotary embedding of x [n, dim] at positions 0, 1, ... by complex numbers, neighbours paired."""
    dim = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * cfg.rope.theta ** (-torch.arange(0, dim, 2).double() / dim)
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(len(x), -1, 2)) * turns).flatten(1)


def by_hand(cfg: ModelConfig, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal MLA of one sequence x [n, hidden] at positions 0, 1, ..., written per head from the formula."""
    w = {name.removeprefix("attn."): tensor.double() for name, tensor in state.items()}
    n, nope = len(x), cfg.qk_nope_head_dim
    q_in = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
    q = (q_in @ w["q_b_proj.weight"].T).view(n, cfg.num_attention_heads, -1)
    kv = x @ w["kv_a_proj_with_mqa.weight"].T
    latent = rms(kv[:, : cfg.kv_lora_rank], w["kv_a_layernorm.weight"])
    k_pe = turn(kv[:, cfg.kv_lora_rank :], cfg)
    expanded = (latent @ w["kv_b_proj.weight"].T).view(n, cfg.num_attention_heads, -1)
    heads = []
    for head in range(cfg.num_attention_heads):
        query = torch.cat((q[:, head, :nope], turn(q[:, head, nope:], cfg)), -1)
        key = torch.cat((expanded[:, head, :nope], k_pe), -1)
        scores = (query @ key.T * cfg.qk_head_dim**-0.5).masked_fill(
            torch.ones(n, n).triu(1).bool(), -torch.inf
        )
        heads.append(scores.softmax(-1) @ expanded[:, head, nope:])
    return torch.cat(heads, -1) @ w["o_proj.weight"].T


def test_prefill_and_decode_follow_the_formula() -> None:
    """Naive prefill and absorbed decode both equal MLA as written in the report, head by head."""
    cfg, mla, rotary, state = layer(rope_scaling=None)
    x = torch.randn(11, cfg.hidden_size, dtype=torch.float64)
    expected = by_hand(cfg, state, x)
    pool = pool_of(cfg)
    inp = pool.prefill_input([[0] * 11], [0])
    assert_close(
        mla.prefill(x, plan_prefill(inp, rotary, pool.cache, mla), pool.cache[0]).sum(0),
        expected,
        "fp64",
        what="prefill",
    )
    pool = pool_of(cfg)
    tree = pool.tree_input([Tree.chain([0] * 11)], [0])
    out = mla.decode(x, plan_decode(tree, rotary, pool.cache), pool.cache[0]).sum(0)
    assert_close(out, expected, "fp64", what="decode")


@pytest.mark.parametrize("q_lora_rank", [48, None])
@pytest.mark.parametrize("rope_interleave", [True, False])
def test_naive_and_absorbed_agree(q_lora_rank: int | None, rope_interleave: bool) -> None:
    """A prefix by prefill and then one chain gives what one prefill gives, and the same cache."""
    cfg, mla, rotary, _ = layer(q_lora_rank=q_lora_rank, rope_interleave=rope_interleave)
    x = torch.randn(12, cfg.hidden_size, dtype=torch.float64)
    whole, parts = pool_of(cfg), pool_of(cfg)
    plan = plan_prefill(whole.prefill_input([[0] * 12], [0]), rotary, whole.cache, mla)
    expected = mla.prefill(x, plan, whole.cache[0]).sum(0)
    mla.prefill(
        x[:5], plan_prefill(parts.prefill_input([[0] * 5], [0]), rotary, parts.cache, mla), parts.cache[0]
    )
    plan = plan_decode(parts.tree_input([Tree.chain([0] * 7)], [5]), rotary, parts.cache)
    assert_close(mla.decode(x[5:], plan, parts.cache[0]).sum(0), expected[5:], "fp64")
    used = torch.tensor(whole.slots(0, range(12)))
    assert_close(parts.cache[0].flatten(0, 1)[used], whole.cache[0].flatten(0, 1)[used], "fp64")


def test_the_cache_holds_the_normed_latent_and_the_rotated_key() -> None:
    """An entry is RMSNorm of the latent part alone, then the turned shared key."""
    cfg, mla, rotary, state = layer(rope_scaling=None)
    x, pool = torch.randn(6, cfg.hidden_size, dtype=torch.float64), pool_of(cfg)
    mla.prefill(x, plan_prefill(pool.prefill_input([[0] * 6], [0]), rotary, pool.cache, mla), pool.cache[0])
    kv = x @ state["attn.kv_a_proj_with_mqa.weight"].double().T
    latent = rms(kv[:, : cfg.kv_lora_rank], state["attn.kv_a_layernorm.weight"].double())
    expected = torch.cat((latent, turn(kv[:, cfg.kv_lora_rank :], cfg)), -1)
    entries = pool.cache[0].flatten(0, 1)[torch.tensor(pool.slots(0, range(6)))]
    assert_close(entries, expected, "fp64")


def test_absorbed_weights_are_halves_of_each_head() -> None:
    """Rows of kv_b are [key rows, value rows] head by head, not all keys and then all values."""
    cfg, mla, _, state = layer()
    rows = state["attn.kv_b_proj.weight"].double()
    width = cfg.qk_nope_head_dim + cfg.v_head_dim
    for head in range(cfg.num_attention_heads):
        own = rows[head * width : (head + 1) * width]
        assert_close(mla.w_uk[head], own[: cfg.qk_nope_head_dim], "bitwise")
        assert_close(mla.w_uv[head], own[cfg.qk_nope_head_dim :], "bitwise")
