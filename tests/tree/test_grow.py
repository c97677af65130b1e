"""Growth and rerank: trees worked out by hand, and agreement with the naive version on random ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nextn.config import SpecConfig
from nextn.errors import ConfigError
from nextn.kernels.ref.tree_ops import chosen_candidates
from nextn.tree import grow, naive
from nextn.tree.grow import Growth
from nextn.tree.tree import DraftTree
from tests.strategies import TableDraft, grown
from tests.tree.vectors import ROOT, VECTORS, Vector

ALL_BITS = (1 << 64) - 1


def leaf_paths(tree: naive.Tree) -> list[list[int]]:
    """Node numbers from the root to each leaf, leaves in ascending order."""
    paths = []
    for leaf in range(len(tree.tokens)):
        if leaf not in tree.parents:
            path = [leaf]
            while path[-1] != 0:
                path.append(tree.parents[path[-1]])
            paths.append(path[::-1])
    return paths


def grow_table(draft: TableDraft, spec: SpecConfig) -> Growth:
    """Grow from a table draft as an engine does, ranking by the values themselves."""
    first = draft.rows(torch.zeros(draft.table.shape[0], 1, 0, dtype=torch.int64))
    tokens, values = grow.top_children(first, first, spec.topk)
    growth = grow.start(tokens[:, 0], values[:, 0], spec)
    while growth.level < spec.num_steps:
        rows = draft.rows(growth.beam().path_tokens)
        growth.extend(*grow.top_children(rows, rows, spec.topk))
    return growth


def grow_vector(vector: Vector, dtype: torch.dtype) -> tuple[Growth, list[list[int]]]:
    """Grow from a vector's explicit children; returns the beams' flat numbers as well."""

    def level(paths: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        rows = [vector.log_children(path) for path in paths]
        tokens = torch.tensor([[token for token, _ in row] for row in rows])
        values = torch.tensor([[value for _, value in row] for row in rows], dtype=dtype)
        return tokens, values

    growth = grow.start(*level([()]), vector.spec)
    beams = []
    while growth.level < vector.spec.num_steps:
        beam = growth.beam()
        beams.append(beam.flat[0].tolist())
        tokens, values = level([tuple(path) for path in beam.path_tokens[0].tolist()])
        growth.extend(tokens.unsqueeze(0), values.unsqueeze(0))
    return growth, beams


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str, dtype: torch.dtype) -> None:
    """Beams, chosen candidates, parents, depths and masks are those worked out by hand."""
    vector = VECTORS[name]
    growth, beams = grow_vector(vector, dtype)
    tree = growth.rerank(torch.tensor([ROOT]))
    tree.check()
    chosen = chosen_candidates(growth._pool, vector.spec.draft_tokens - 1)
    assert chosen.tolist() == [vector.chosen]
    assert tree.parents.tolist() == [vector.parents]
    for got, expected in (
        (beams, vector.beams),
        (tree.tokens[0].tolist(), vector.tokens),
        (tree.depth[0].tolist(), vector.depths),
        (tree.mask[0].tolist(), vector.masks),
    ):
        assert expected is None or got == expected


@pytest.mark.parametrize("name", VECTORS)
def test_naive_vector(name: str) -> None:
    """The naive version gives the hand-made trees too, and their leaf paths."""
    vector = VECTORS[name]
    pool, beams = naive.grow(vector.log_children, vector.spec)
    assert len(pool) == vector.spec.pool_size
    assert naive.rerank(pool, vector.spec) == vector.chosen
    tree = naive.draft(ROOT, vector.log_children, vector.spec)
    assert tree.parents == vector.parents
    for got, expected in (
        (beams, vector.beams),
        (tree.tokens, vector.tokens),
        (tree.depths, vector.depths),
        (tree.masks, vector.masks),
        (leaf_paths(tree), vector.leaf_paths),
    ):
        assert expected is None or got == expected


def assert_same(tree: DraftTree, row: int, expected: naive.Tree) -> None:
    """Row `row` of the batch is the naive tree; values to the rounding of the batch's dtype."""
    assert tree.tokens[row].tolist() == expected.tokens
    assert tree.parents[row].tolist() == expected.parents
    assert tree.depth[row].tolist() == expected.depths
    assert [mask & ALL_BITS for mask in tree.mask[row].tolist()] == expected.masks
    assert tree.logp[row].tolist() == expected.values


@settings(max_examples=200)
@given(grown())
def test_batch_equals_naive(case: tuple[SpecConfig, TableDraft]) -> None:
    """Every row of a batch is the naive tree of its draft, ties, -inf and NaN included; no orphans."""
    spec, draft = case
    rows = draft.table.shape[0]
    root = torch.arange(rows) + 100
    tree = grow_table(draft, spec).rerank(root)
    tree.check()
    for row in range(rows):
        assert_same(tree, row, naive.draft(100 + row, lambda path, r=row: draft.children(r, path), spec))


def check_beams(spec: SpecConfig, draft: TableDraft) -> None:
    """Follow the beams level by level against the naive pool."""
    pools = [
        naive.grow(lambda path, r=row: draft.children(r, path), spec) for row in range(draft.table.shape[0])
    ]
    first = draft.rows(torch.zeros(len(pools), 1, 0, dtype=torch.int64))
    tokens, values = grow.top_children(first, first, spec.topk)
    growth = grow.start(tokens[:, 0], values[:, 0], spec)
    while growth.level < spec.num_steps:
        beam = growth.beam()
        assert (beam.level, beam.start) == (growth.level, (growth.level - 1) * spec.topk)
        assert bool(beam.path_valid.all())
        for row, (pool, beams) in enumerate(pools):
            flat = beams[beam.level - 1]
            nodes = [pool[number] for number in flat]
            assert beam.flat[row].tolist() == flat
            assert beam.tokens[row].tolist() == [node.token for node in nodes]
            assert beam.values[row].tolist() == [node.value for node in nodes]
            assert beam.path_tokens[row].tolist() == [list(node.path) for node in nodes]
            masks = naive.beam_masks(pool, beams)[beam.level - 1]
            assert [mask & ALL_BITS for mask in beam.mask[row].tolist()] == masks
            above = beams[beam.level - 2] if beam.level > 1 else [-1]
            assert [above[slot] for slot in beam.parent_slot[row].tolist()] == [node.parent for node in nodes]
        rows = draft.rows(beam.path_tokens)
        growth.extend(*grow.top_children(rows, rows, spec.topk))


@given(grown())
def test_beams_equal_naive(case: tuple[SpecConfig, TableDraft]) -> None:
    """A beam's tokens, parents, paths and step-buffer masks are those of the naive pool."""
    check_beams(*case)


@pytest.mark.parametrize("shape", ["3/8/64", "63/1/64", "9/8/64", "17/4/40"])
def test_largest_shapes(shape: str) -> None:
    """64 nodes and 64 step-buffer entries work: bit 63 is the sign bit."""
    spec = SpecConfig.parse(shape)
    draft = TableDraft(torch.randn(2, 5, 11, dtype=torch.float64).log_softmax(-1))
    check_beams(spec, draft)
    tree = grow_table(draft, spec).rerank(torch.tensor([3, 4]))
    tree.check()
    assert_same(tree, 1, naive.draft(4, lambda path: draft.children(1, path), spec))


def test_positive_value_does_not_outrank_its_parent() -> None:
    """A value above 0, which no log-probability is, counts as 0 and so cannot orphan a node."""
    spec = SpecConfig(3, 2, 6)
    draft = TableDraft(torch.tensor([[[-1.0, 5.0, math.inf], [-2.0, 0.5, -4.0]]]))
    tree = grow_table(draft, spec).rerank(torch.tensor([9]))
    tree.check()
    assert_same(tree, 0, naive.draft(9, lambda path: draft.children(0, path), spec))


@pytest.mark.parametrize(("tokens", "values"), [((2, 2), (2, 2)), ((2, 3), (2, 2)), ((2, 3), (1, 3))])
def test_a_start_with_another_number_of_children_is_refused(
    tokens: tuple[int, int], values: tuple[int, int]
) -> None:
    """With a sentence: tokens and values of the root are [B, k]."""
    with pytest.raises(AssertionError, match="the root has 3 children a row, and a value for each"):
        grow.start(torch.zeros(tokens, dtype=torch.int64), torch.zeros(values), SpecConfig(2, 3, 4))


def test_growth_on_a_row_does_not_depend_on_the_batch() -> None:
    """A row grown alone is bit for bit the row grown in a batch."""
    spec = SpecConfig(3, 3, 9)
    draft = TableDraft(torch.randn(4, 6, 8).log_softmax(-1))
    whole = grow_table(draft, spec).rerank(torch.arange(4))
    alone = grow_table(TableDraft(draft.table[2:3]), spec).rerank(torch.tensor([2]))
    for name in ("tokens", "parents", "depth", "mask", "logp"):
        assert torch.equal(getattr(whole, name)[2:3], getattr(alone, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", [4, 31, 32, 33, 100, 129, 4096, 16384, 16385])
def test_top_children_ties(vocab: int, dtype: torch.dtype) -> None:
    """The k best by score, the lower id among equals, NaN and -inf last, for any length of vocabulary."""
    alphabet = torch.tensor([1.0, 1.0, 0.5, -2.0, -math.inf, math.nan], dtype=dtype)
    rare = torch.tensor([-math.inf, math.nan], dtype=dtype)
    scores = alphabet[torch.randint(0, 6, (2, 3, vocab))]
    scores[1, 0] = rare[torch.randint(0, 2, (vocab,))]  # fewer finite scores than children
    scores[0, 0] = (2 * torch.randn(vocab)).round().to(dtype)  # equals far apart, below rare larger scores
    scores[1, 1] = 0.25
    scores[1, 2] = torch.randn(vocab, dtype=torch.float32).to(dtype)
    values = torch.randn(2, 3, vocab, dtype=torch.float64)
    for k in (1, 3, 4):
        tokens, chosen = grow.top_children(scores, values, k)
        assert torch.equal(chosen, values.gather(-1, tokens))
        for b in range(2):
            for m in range(3):
                expected = naive.top_children(list(enumerate(scores[b, m].tolist())), k)
                assert tokens[b, m].tolist() == [token for token, _ in expected]


def test_more_children_than_tokens_is_refused() -> None:
    """A width above the vocabulary is an error that names the flag."""
    scores = torch.zeros(1, 1, 3)
    with pytest.raises(ConfigError, match="--topk 4"):
        grow.top_children(scores, scores, 4)
