"""The tree's own methods: chains, paths, and a check that catches each broken invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from nextn.config import SpecConfig
from nextn.tree.tree import DraftTree
from tests.strategies import TableDraft, grown
from tests.tree.test_grow import grow_table


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_chain(size: int) -> None:
    """In a chain each node's mask holds all nodes before it, and the invariants hold up to 64 nodes."""
    tree = DraftTree.chain(torch.arange(2 * size).view(2, size))
    tree.check()
    assert tree.mask[1, -1].item() & ((1 << 64) - 1) == (1 << size) - 1
    assert (tree.size, tree.levels) == (size, size - 1)


def test_plain_is_one_node() -> None:
    """Plain decoding's tree is the root alone, with paths of no token."""
    tree = DraftTree.plain(torch.tensor([7, 8, 9]))
    tree.check()
    tokens, valid = tree.path_tokens()
    assert tree.tokens.tolist() == [[7], [8], [9]]
    assert tokens.shape == valid.shape == (3, 1, 0)
    assert tokens.dtype == torch.int64


@given(grown())
def test_path_tokens_are_the_ancestors(case: tuple[SpecConfig, TableDraft]) -> None:
    """A node's path is its own token and those of its ancestors but the root's: as many as it is deep."""
    spec, draft = case
    tree = grow_table(draft, spec).rerank(torch.zeros(draft.table.shape[0], dtype=torch.int64))
    tokens, valid = tree.path_tokens()
    assert tokens.shape == valid.shape == (*tree.tokens.shape, tree.size - 1)
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.size):
            path, ancestor = [], node
            while ancestor > 0:
                path.append(int(tree.tokens[row, ancestor]))
                ancestor = int(tree.parents[row, ancestor])
            assert tokens[row, node][valid[row, node]].tolist() == path[::-1]
            assert len(path) == tree.depth[row, node]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", [[0, 1, 1, 3]]),
        ("parents", [[-1, 0, 3, 1]]),
        ("parents", [[0, 0, 0, 1]]),
        ("depth", [[0, 1, 2, 2]]),
        ("mask", [[1, 3, 5, 9]]),
        ("logp", [[0.0, -1.0, -2.0, -0.5]]),
    ],
)
def test_check_finds(name: str, value: list[list[float]]) -> None:
    """Equal siblings, a parent after its child, a second root, a wrong depth, mask or value do not pass."""
    tree = DraftTree(
        tokens=torch.tensor([[0, 1, 2, 3]]),
        parents=torch.tensor([[-1, 0, 0, 1]]),
        depth=torch.tensor([[0, 1, 1, 2]]),
        mask=torch.tensor([[1, 3, 5, 11]]),
        logp=torch.tensor([[0.0, -1.0, -2.0, -1.5]]),
        levels=2,
    )
    tree.check()
    with pytest.raises(AssertionError):
        replace(tree, **{name: torch.tensor(value)}).check()
