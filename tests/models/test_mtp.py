"""The NextN layer against transformers' MTP model, and its passes against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nextn.config import ModelConfig
from nextn.models.inputs import DraftInput
from nextn.models.mtp import NextN
from tests.compare import assert_close
from tests.models.build import (
    CPU,
    Pool,
    Tiny,
    Tree,
    build,
    load_state,
    prefill,
    random_tokens,
    signed,
    small_dict,
    tiny_dict,
)
from tests.models.oracle import MtpOracle


def draft_prefill(tiny: Tiny, pool: Pool, tokens: list[int], root: int) -> Tensor:
    """Run target and draft over a prompt; the draft's recycled states of every row.  # [n, hidden]"""
    hidden = tiny.target.final_norm(prefill(tiny, pool, [tokens], [0]))
    inp = pool.prefill_input([[*tokens[1:], root]], [0])
    return tiny.draft.final_norm(tiny.draft.prefill(inp, hidden, pool.cache).hidden)


def empty_tail(tiny: Tiny, rows: int, entries: int) -> Tensor:
    """A draft's step buffer, NaN until written.  # [rows, entries, C]"""
    return torch.full((rows, entries, tiny.cfg.latent_dim), float("nan"), dtype=tiny.dtype)


def draft_level(
    tiny: Tiny,
    pool: Pool,
    tail: Tensor,
    start: int,
    prefix: int,
    tokens: list[int],
    masks: list[int],
    hidden: Tensor,
) -> Tensor:
    """One level of a beam of one row at depth start / beam width.  # [M, hidden], recycled states"""
    level = start // len(tokens)
    inp = DraftInput(
        tokens=torch.tensor([tokens]),
        positions=torch.full((1, len(tokens)), prefix + level),
        mask=torch.tensor([[signed(bits) for bits in masks]]),
        tail=tail,
        start=start,
        prefix_lens=torch.tensor([prefix]),
        page_table=pool.table(),
    )
    return tiny.draft.final_norm(tiny.draft.decode(inp, hidden[None], pool.cache).hidden)[0]


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None, "rope_scaling": None, "n_group": 1, "topk_group": 1}]
)
def test_every_row_has_the_logits_of_transformers(changes: dict[str, Any]) -> None:
    """Draft logits of all rows of a prompt equal those of transformers' MTP layer."""
    config = tiny_dict(**changes)
    tiny = build(config)
    tokens, root = random_tokens(tiny, 21), 7
    oracle = MtpOracle(config, tiny)
    expected = oracle.model.lm_head(oracle.rows([*tokens[1:], root], oracle.hidden(tokens)))
    actual = tiny.target.logits(draft_prefill(tiny, tiny.pool(), tokens, root))
    assert_close(actual, expected, "fp32-logits")


def test_drafts_along_a_path_have_the_logits_of_transformers() -> None:
    """Draft steps through a step buffer, each fed its parent's state, equal transformers' whole sequences."""
    config = tiny_dict()
    tiny = build(config)
    tokens, root, path = random_tokens(tiny, 13), 5, [9, 4, 100, 7]
    pool = tiny.pool()
    state = draft_prefill(tiny, pool, tokens, root)[-1:]
    states, tail = [state], empty_tail(tiny, 1, 6)
    for level, token in enumerate(path):
        mask = [(1 << (level + 1)) - 1]
        states.append(draft_level(tiny, pool, tail, level, len(tokens), [token], mask, states[-1]))
    actual = tiny.target.logits(torch.cat(states))
    assert_close(actual, MtpOracle(config, tiny).draft(tokens, root, path), "fp32-logits")


@pytest.fixture(scope="module")
def small() -> Tiny:
    """A small float64 model with a NextN layer."""
    return build(small_dict(num_nextn_predict_layers=1), dtype=torch.float64)


def test_a_beam_sees_its_ancestors_only(small: Tiny) -> None:
    """Two levels of a beam of three, parents permuted: each node equals a chain over its own path."""
    tokens, root, pool = random_tokens(small, 9), 3, small.pool()
    state = draft_prefill(small, pool, tokens, root)[-1:]
    beams, parents = [[11, 12, 13], [21, 22, 23]], [2, 0, 2]
    tail = empty_tail(small, 1, 6)
    first = draft_level(small, pool, tail, 0, 9, beams[0], [1, 2, 4], state.expand(3, -1))
    masks = [1 << parent | 1 << (3 + slot) for slot, parent in enumerate(parents)]
    second = draft_level(small, pool, tail, 3, 9, beams[1], masks, first[parents])
    for slot, parent in enumerate(parents):
        alone = empty_tail(small, 1, 2)
        expected = draft_level(small, pool, alone, 0, 9, [beams[0][parent]], [1], state)
        assert_close(first[parent], expected[0], "fp64")
        expected = draft_level(small, pool, alone, 1, 9, [beams[1][slot]], [3], expected)
        assert_close(second[slot], expected[0], "fp64", what=f"slot {slot}")


def test_drafting_leaves_the_cache_alone(small: Tiny) -> None:
    """A draft level changes its own part of the step buffer and nothing in the pages."""
    tokens, pool = random_tokens(small, 6), small.pool()
    state = draft_prefill(small, pool, tokens, 1)[-1:]
    cache, tail = pool.cache.clone(), empty_tail(small, 1, 4)
    draft_level(small, pool, tail, 1, 6, [8], [0b10], state)
    assert_close(pool.cache, cache, "bitwise")
    assert tail.isfinite().all(-1).tolist() == [[False, True, False, False]]


def test_extension_after_verification_is_prefill(small: Tiny) -> None:
    """A chain of accepted pairs, shorter in one row, gives the states and cache of one long prefill."""
    rows, starts, ends = [random_tokens(small, 14), random_tokens(small, 12)], [7, 9], [11, 10]
    pool = small.pool()
    hidden = [small.target.final_norm(prefill(small, small.pool(), [row], [0])) for row in rows]
    first = pool.prefill_input([row[1 : s + 1] for row, s in zip(rows, starts, strict=True)], [0, 0])
    before = torch.cat([h[:s] for h, s in zip(hidden, starts, strict=True)])
    small.draft.prefill(first, before, pool.cache)
    chains = [Tree.chain(row[s + 1 : e + 1]) for row, s, e in zip(rows, starts, ends, strict=True)]
    inp = pool.tree_input(chains, starts)
    given = torch.full((2, 4, small.cfg.hidden_size), float("nan"), dtype=small.dtype)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        given[row, : end - start] = hidden[row][start:end]
    out = small.draft.decode(inp, given, pool.cache).hidden
    assert out.isfinite().all()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        whole = small.pool()
        pairs = whole.prefill_input([rows[row][1 : end + 1]], [0])
        expected = small.draft.prefill(pairs, hidden[row][:end], whole.cache).hidden
        assert_close(out[row, : end - start], expected[start:], "fp64", what=f"row {row}")
        layer = small.cfg.num_hidden_layers
        slots = torch.tensor(pool.slots(row, range(end))), torch.tensor(whole.slots(0, range(end)))
        ours, theirs = pool.cache[layer].flatten(0, 1)[slots[0]], whole.cache[layer].flatten(0, 1)[slots[1]]
        assert_close(ours, theirs, "fp64")


def test_only_the_last_cache_layer_is_the_drafts(small: Tiny) -> None:
    """The draft's prefill leaves the target's layers alone, and the target's the draft's."""
    tokens, pool = random_tokens(small, 5), small.pool()
    hidden = small.target.final_norm(prefill(small, pool, [tokens], [0]))
    assert pool.cache[-1].isnan().all()
    before = pool.cache.clone()
    small.draft.prefill(pool.prefill_input([[*tokens[1:], 0]], [0]), hidden, pool.cache)
    assert_close(pool.cache[:-1], before[:-1], "bitwise")
    assert pool.cache[-1].isfinite().any()


def test_shared_weights_are_registered_once(small: Tiny) -> None:
    """The NextN module holds neither embedding nor head, and names no such tensor."""
    held = {parameter.data_ptr() for parameter in small.target.parameters()}
    assert not held & {parameter.data_ptr() for parameter in small.draft.parameters()}
    names = [spec.name for spec in small.draft.specs()]
    assert all(name.startswith("model.layers.2.") for name in names)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names)
    assert "model.layers.2.shared_head.norm.weight" in names


def test_an_exported_draft_computes_the_same(small: Tiny) -> None:
    """Names of layer 0 and a config with one dense-looking layer: same states, same cache layer."""
    config = small_dict(num_nextn_predict_layers=1, num_hidden_layers=1, first_k_dense_replace=3)
    cfg = ModelConfig.from_dict(config | {"architectures": ["DeepseekV3ForCausalLMNextN"]})
    exported = NextN(cfg, small.target, dtype=small.dtype, device=CPU, keep_fp8=False)
    renamed = {
        name.replace("model.layers.2.", "model.layers.0."): tensor
        for name, tensor in small.state.items()
        if name.startswith("model.layers.2.")
    }
    load_state(exported.specs(), renamed)
    tokens, pool, other = random_tokens(small, 8), small.pool(), small.pool()
    expected = draft_prefill(small, pool, tokens, 2)
    hidden = small.target.final_norm(prefill(small, other, [tokens], [0]))
    out = exported.prefill(other.prefill_input([[*tokens[1:], 2]], [0]), hidden, other.cache).hidden
    assert_close(exported.final_norm(out), expected, "bitwise")
    assert_close(other.cache, pool.cache, "bitwise")
