"""Acceptance: the walk equals the naive one on random trees, and its padding is as promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.tree import naive
from nextn.tree.accept import accept, simulated
from nextn.tree.tree import DraftTree
from tests.strategies import TableDraft, grown
from tests.tree.test_grow import grow_table


@given(grown(), st.integers(0, 2**31), st.booleans())
def test_walk_equals_naive(case: tuple[SpecConfig, TableDraft], seed: int, short: bool) -> None:
    """Path, length and tokens are those of the naive walk; padding repeats the last node and the bonus."""
    spec, draft = case
    rows, vocab = draft.table.shape[0], draft.table.shape[2]
    tree = grow_table(draft, spec).rerank(torch.zeros(rows, dtype=torch.int64))
    target = torch.randint(0, vocab, (rows, tree.size), generator=torch.Generator().manual_seed(seed))
    width = spec.width - 1 if short and spec.width > 1 else spec.width
    accepted = accept(tree, target, width)
    assert accepted.path.shape == accepted.tokens.shape == accepted.valid.shape == (rows, width)
    for row in range(rows):
        lists = naive.draft(0, lambda path, r=row: draft.children(r, path), spec)
        path, emitted = naive.accept(lists, target[row].tolist(), width)
        pad = width - len(path)
        assert accepted.length[row] == len(path)
        assert accepted.path[row].tolist() == path + path[-1:] * pad
        assert accepted.tokens[row].tolist() == emitted + emitted[-1:] * pad
        assert accepted.valid[row].tolist() == [True] * len(path) + [False] * pad


def test_deepest_path_is_accepted_whole() -> None:
    """Where the target agrees along a chain, every draft token and the bonus are emitted."""
    tree = DraftTree.chain(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]))
    accepted = accept(tree, torch.tensor([[6, 7, 8, 9], [6, 0, 8, 9]]), width=4)
    assert accepted.tokens.tolist() == [[6, 7, 8, 9], [6, 0, 0, 0]]
    assert accepted.path.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]
    assert accepted.length.tolist() == [4, 2]


def test_matching_token_under_another_parent_is_not_accepted() -> None:
    """A node carries weight only below the node that the walk stands on."""
    tree = DraftTree(
        tokens=torch.tensor([[0, 1, 2, 3]]),
        parents=torch.tensor([[-1, 0, 0, 1]]),
        depth=torch.tensor([[0, 1, 1, 2]]),
        mask=torch.tensor([[1, 3, 5, 11]]),
        logp=torch.zeros(1, 4),
        levels=2,
    )
    accepted = accept(tree, torch.tensor([[2, 3, 3, 4]]), width=3)
    assert accepted.path.tolist() == [[0, 2, 2]]
    assert accepted.tokens.tolist() == [[2, 3, 3]]


def test_plain_emits_one_token() -> None:
    """A tree of the root alone emits the target's token."""
    accepted = accept(DraftTree.plain(torch.tensor([4, 5])), torch.tensor([[8], [9]]), width=1)
    assert accepted.tokens.tolist() == [[8], [9]]
    assert accepted.length.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("length", "path", "tokens"),
    [
        (1, [0, 0, 0], [90, 90, 90]),
        (2, [0, 1, 1], [11, 91, 91]),
        (3, [0, 1, 2], [11, 12, 92]),
        (0, [0, 0, 0], [90, 90, 90]),
        (9, [0, 1, 2], [11, 12, 92]),
    ],
)
def test_simulated(length: int, path: list[int], tokens: list[int]) -> None:
    """A pretended length takes nodes in node order, then the target's token; it is clamped to what fits."""
    tree = DraftTree.chain(torch.tensor([[10, 11, 12, 13]]))
    accepted = simulated(tree, torch.tensor([length]), torch.tensor([[90, 91, 92, 93]]), width=3)
    assert accepted.path.tolist() == [path]
    assert accepted.tokens.tolist() == [tokens]
    assert accepted.length.tolist() == [len(set(path))]
