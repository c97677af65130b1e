"""The target model against transformers, and its ways of computing the same tokens against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.models.moe import Gate, RoutedExperts
from tests.compare import assert_close
from tests.models.build import Pool, Tiny, Tree, build, prefill, random_tokens, small_dict, tiny_dict
from tests.models.oracle import logits, target_model

V2 = {
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "one group": {"n_group": 1, "topk_group": 1},
    "without q_lora": {"q_lora_rank": None},
    "plain rope": {"rope_scaling": None},
    "short yarn with mscale": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}},
    "half-split rope": {"rope_interleave": False},
    "eps 1e-2 in layer norms only": {"rms_norm_eps": 1e-2},
    "unnormalised weights": {"norm_topk_prob": False},
    "v2-lite": V2,
    "v2-lite yarn": V2 | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "v2": V2
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_gives_the_logits_of_transformers(variant: str) -> None:
    """One prefill of a random model has transformers' logits, for each variant of the architecture."""
    config = tiny_dict(**VARIANTS[variant])
    tiny = build(config)
    tokens = torch.randint(tiny.cfg.vocab_size, (37,)).tolist()
    actual = tiny.logits(prefill(tiny, tiny.pool(), [tokens], [0]))
    assert_close(actual, logits(target_model(config, tiny), tokens), "fp32-logits")


@pytest.fixture(scope="module")
def small() -> Tiny:
    """A small float64 model, so that what must be equal is equal to some 1e-12."""
    return build(small_dict(), dtype=torch.float64)


def plain_states(tiny: Tiny, tokens: list[int]) -> Tensor:
    """States of one sequence by one prefill into a cache of its own.  # [n, hidden]"""
    return prefill(tiny, tiny.pool(), [tokens], [0])


def decode(tiny: Tiny, pool: Pool, trees: list[Tree], starts: list[int]) -> Tensor:
    """States of trees on top of cached prefixes.  # [B, M, hidden]"""
    return tiny.target.decode(pool.tree_input(trees, starts), pool.cache).hidden


@settings(max_examples=25)
@given(data=st.data(), page_size=st.sampled_from([1, 3, 4, 16]))
def test_prefill_in_any_chunks_is_prefill_in_one_go(small: Tiny, data: st.DataObject, page_size: int) -> None:
    """However two requests are cut into chunks that share batches, states and cache equal one prefill's."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=2))
    rows = [random_tokens(small, length) for length in lengths]
    pool = small.pool(page_size=page_size)
    done, states = [0, 0], ([], [])  # type: ignore[var-annotated]
    while done != lengths:
        left = [length - start for length, start in zip(lengths, done, strict=True)]
        sizes = [data.draw(st.integers(0 if left[1] else 1, left[0]))]
        sizes.append(data.draw(st.integers(0 if sizes[0] else 1, left[1])))
        chunks = [row[start : start + size] for row, start, size in zip(rows, done, sizes, strict=True)]
        out = prefill(small, pool, chunks, done)
        for row, part in enumerate(out.split(sizes)):
            states[row].append(part)
        done = [start + size for start, size in zip(done, sizes, strict=True)]
    for row, tokens in enumerate(rows):
        whole = small.pool(page_size=page_size)
        assert_close(torch.cat(states[row]), prefill(small, whole, [tokens], [0]), "fp64", what=f"row {row}")
        assert_close(entries(small, pool, row, len(tokens)), entries(small, whole, 0, len(tokens)), "fp64")


def entries(tiny: Tiny, pool: Pool, row: int, length: int, layers: int | None = None) -> Tensor:
    """A row's cache entries in the target's layers, in order of position.  # [layers, length, C]"""
    slots = torch.tensor(pool.slots(row, range(length)))
    return pool.cache[: layers or tiny.cfg.num_hidden_layers].flatten(1, 2)[:, slots]


def test_decoding_token_by_token_is_prefill(small: Tiny) -> None:
    """Absorbed single-token decodes of two rows of unequal length give the naive prefill's states."""
    rows = [random_tokens(small, 15), random_tokens(small, 22)]
    starts, pool = [2, 9], small.pool()
    prefill(small, pool, [row[:start] for row, start in zip(rows, starts, strict=True)], starts=[0, 0])
    expected = [plain_states(small, row) for row in rows]
    for step in range(13):
        at = [start + step for start in starts]
        trees = [Tree([row[position]], [-1]) for row, position in zip(rows, at, strict=True)]
        out = decode(small, pool, trees, at)
        for row, position in enumerate(at):
            assert_close(out[row, 0], expected[row][position], "fp64", what=f"row {row} position {position}")


def test_a_chain_of_masks_is_prefill(small: Tiny) -> None:
    """Absorbed decode of a whole sequence as a chain, without a prefix, equals its naive prefill."""
    tokens, pool = random_tokens(small, 24), small.pool()
    out = decode(small, pool, [Tree.chain(tokens)], [0])
    assert_close(out[0], plain_states(small, tokens), "fp64")
    whole = small.pool()
    prefill(small, whole, [tokens], [0])
    assert_close(entries(small, pool, 0, 24), entries(small, whole, 0, 24), "fp64")


@st.composite
def trees(draw: st.DrawFn, nodes: int) -> list[int]:
    """Parents of a random tree."""
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@settings(max_examples=15)
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2))
def test_each_node_of_a_tree_is_a_plain_forward_over_its_path(
    small: Tiny, data: st.DataObject, sizes: list[int]
) -> None:
    """Rows with trees of unequal size: a node's state is that of its prefix and path read in order."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    starts = data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=2))
    prefixes = [random_tokens(small, start) for start in starts]
    forest = [Tree(random_tokens(small, size), data.draw(trees(size))) for size in sizes]
    pool = small.pool()
    prefill(small, pool, prefixes, [0, 0])
    out = decode(small, pool, forest, starts)
    assert out.isfinite().all(), "the output of padded nodes must be finite"
    for row, (prefix, tree) in enumerate(zip(prefixes, forest, strict=True)):
        for node in range(len(tree.tokens)):
            path = [tree.tokens[step] for step in tree.path(node)]
            expected = plain_states(small, prefix + path)[-1]
            assert_close(out[row, node], expected, "fp64", what=f"row {row} node {node}")


def test_a_tree_of_64_nodes_uses_the_sign_bit(small: Tiny) -> None:
    """The last node of a 64-node chain, whose own bit is the sign bit, equals prefill."""
    tokens, prefix = random_tokens(small, 64), random_tokens(small, 3)
    pool = small.pool()
    prefill(small, pool, [prefix], [0])
    out = decode(small, pool, [Tree.chain(tokens)], [3])
    assert_close(out[0], plain_states(small, prefix + tokens)[3:], "fp64")


def test_a_decode_of_padding_alone_writes_nothing(small: Tiny) -> None:
    """With every node invalid the cache keeps its bytes and the output is finite."""
    pool = small.pool()
    pool.cache.normal_()
    before = pool.cache.clone()
    inp = pool.tree_input([Tree.chain([1, 2, 3])], [0])
    inp.valid.fill_(False)
    assert small.target.decode(inp, pool.cache).hidden.isfinite().all()
    assert_close(pool.cache, before, "bitwise")


def test_invalid_nodes_read_no_expert() -> None:
    """With every expert that only padded nodes chose full of NaN, all outputs stay finite."""
    tiny, choices = build(small_dict(num_hidden_layers=1, first_k_dense_replace=0), dtype=torch.float64), []
    gates = [module for module in tiny.target.modules() if isinstance(module, Gate)]
    gates[0].register_forward_hook(lambda _module, _inputs, output: choices.append(output[1]))
    inp = tiny.pool().tree_input([Tree([1, 2, 3, 4], [-1, 0, 0, 1]), Tree([5], [-1])], [0, 0])
    inp.valid[0] = False
    expected = tiny.target.decode(inp, tiny.pool().cache).hidden
    idle = torch.ones(tiny.cfg.n_routed_experts, dtype=torch.bool)
    idle[choices[0][inp.valid.flatten()].unique()] = False
    assert idle[choices[0]].any()
    for module in tiny.target.modules():
        if isinstance(module, RoutedExperts):
            module.w13[idle], module.w2[idle] = float("nan"), float("nan")
    assert_close(tiny.target.decode(inp, tiny.pool().cache).hidden, expected, "fp64")


def test_only_valid_nodes_are_written(small: Tiny) -> None:
    """Exactly the slots of valid nodes change, in every layer."""
    pool = small.pool()
    prefixes = [random_tokens(small, 5), random_tokens(small, 6)]
    prefill(small, pool, prefixes, [0, 0])
    before = pool.cache.clone()
    decode(small, pool, [Tree.chain([1, 2, 3]), Tree.chain([4])], [5, 6])
    changed = (pool.cache[:-1] != before[:-1]).logical_and(pool.cache[:-1].isfinite()).flatten(1, 2).any(-1)
    expected = {*pool.slots(0, [5, 6, 7]), *pool.slots(1, [6])}
    for layer in changed:
        assert set(layer.nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_is_close_to_prefill_in_narrow_dtypes(dtype: torch.dtype) -> None:
    """Outputs keep their dtype, logits are float32, and both ways agree within the dtype's rounding."""
    tiny = build(small_dict(num_hidden_layers=1, first_k_dense_replace=1), dtype=dtype)
    tokens, pool = random_tokens(tiny, 12), tiny.pool()
    out = decode(tiny, pool, [Tree.chain(tokens)], [0])[0]
    expected = plain_states(tiny, tokens)
    assert out.dtype == dtype
    logits = tiny.logits(out)
    assert logits.dtype == torch.float32
    if dtype == torch.float32:
        assert_close(logits, tiny.logits(expected), "fp32-logits")
    else:
        # A layer of rounded products: compare the root mean square, not the worst element.
        error = (logits - tiny.logits(expected)).square().mean().sqrt()
        assert error < 2.0**-6 * logits.square().mean().sqrt()
