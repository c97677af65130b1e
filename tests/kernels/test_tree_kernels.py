"""The tree kernels give their twins' bits and the naive version's trees, with ties, -inf and NaN."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.config import SpecConfig
from nextn.kernels import tree_ops
from nextn.kernels.ref import tree_ops as ref
from nextn.kernels.ref.tree_ops import BeamState, Pool
from nextn.tree import naive
from nextn.tree.tree import DraftTree
from tests.compare import assert_close
from tests.conftest import HAS_CUDA
from tests.strategies import TableDraft, grown
from tests.tree.test_grow import ALL_BITS, assert_same

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")


def grow(ops: ModuleType, draft: TableDraft, spec: SpecConfig) -> tuple[Pool, list[BeamState], DraftTree]:
    """Grow and rerank with `ops`, roots 100, 101, ...; the pool, the beams and the tree."""
    k, rows = spec.topk, draft.table.shape[0]
    no_path = torch.zeros(rows, 1, 0, dtype=torch.int64, device=draft.table.device)
    pool = Pool.empty(draft.table[:, 0, :k], spec.num_steps)
    beams: list[BeamState] = []
    beam: BeamState | None = None
    for level in range(1, spec.num_steps + 1):
        scores = draft.rows(no_path if beam is None else beam.path_tokens)
        beam = ops.expand(*ref.top_children(scores, scores, k), beam, pool, level)
        beams += [] if beam is None else [beam]
    assert len(beams) == spec.num_steps - 1
    root = torch.arange(rows, device=draft.table.device) + 100
    tree = ops.rerank(root, pool, k, spec.draft_tokens)
    return pool, beams, DraftTree(*tree, levels=min(spec.num_steps, spec.draft_tokens - 1))


def check(spec: SpecConfig, draft: TableDraft) -> DraftTree:
    """Grow both ways, compare everything, and every row with the naive tree and its beams' masks."""
    draft = TableDraft(draft.table.to(DEVICE))
    pool, beams, tree = grow(tree_ops, draft, spec)
    expected_pool, expected_beams, expected = grow(ref, draft, spec)
    for actual, twin in [(pool, expected_pool), *zip(beams, expected_beams, strict=True)]:
        for name, tensor, like in zip(twin._fields, actual, twin, strict=True):
            assert_close(tensor, like, "bitwise", what=f"{type(twin).__name__}.{name}")
    for name in ("tokens", "parents", "depth", "mask", "logp"):
        assert_close(getattr(tree, name), getattr(expected, name), "bitwise", what=name)
    tree.check()
    for row in range(draft.table.shape[0]):
        pool_row, numbers = naive.grow(lambda path, r=row: draft.children(r, path), spec)
        assert_same(tree, row, naive.build(100 + row, pool_row, naive.rerank(pool_row, spec)))
        for beam, masks in zip(beams, naive.beam_masks(pool_row, numbers), strict=True):
            assert [mask & ALL_BITS for mask in beam.mask[row].tolist()] == masks
    return tree


@settings(max_examples=15)
@given(grown())
def test_growth_equals_its_twin_and_the_naive_version(case: tuple[SpecConfig, TableDraft]) -> None:
    """Pool, beams and tree of every row, with ties, -0, -inf and NaN among the values."""
    check(*case)


@pytest.mark.parametrize("shape", ["63/1/64", "3/8/64", "9/8/64", "2/5/7", "1/20/3", "3/20/64"])
def test_growth_of_the_largest_and_odd_shapes(shape: str) -> None:
    """64 nodes and entries (bit 63 is the sign), widths that are no power of two, a level wider than 64."""
    spec = SpecConfig.parse(shape)
    eighths = torch.randint(-80, 1, (1, 5, spec.topk + 3)) / 8  # exact in any sum, and they tie
    check(spec, TableDraft(eighths))


def test_growth_of_equal_values_keeps_the_first_candidates() -> None:
    """All values equal at a level: the lower number wins, so the tree is the first D-1 of the pool."""
    tree = check(SpecConfig(3, 3, 12), TableDraft(torch.zeros(2, 2, 5)))
    assert tree.parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]


@settings(max_examples=15)
@given(grown(), st.integers(0, 2**31), st.booleans())
def test_accept_equals_its_twin_and_the_naive_walk(
    case: tuple[SpecConfig, TableDraft], seed: int, short: bool
) -> None:
    """Path, length and tokens, `NO_TOKEN` among the target's choices, also for a width below the tree's."""
    spec, draft = case
    _, _, tree = grow(ref, draft, spec)
    vocab = draft.table.shape[2]
    target = torch.randint(-1, vocab, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    width = max(spec.width - short, 1)
    inputs = [tensor.to(DEVICE) for tensor in (tree.tokens, tree.parents, target)]
    actual = tree_ops.accept_path(*inputs, width)
    for tensor, twin in zip(actual, ref.accept_path(*inputs, width), strict=True):
        assert_close(tensor, twin, "bitwise")
    path, length, emitted = actual
    for row in range(len(target)):
        lists = naive.draft(100 + row, lambda p, r=row: draft.children(r, p), spec)
        walked, said = naive.accept(lists, target[row].tolist(), width)
        assert length[row] == len(walked)
        assert path[row, : len(walked)].tolist() == walked
        assert emitted[row, : len(walked)].tolist() == said


def test_accept_walks_a_chain_of_64_to_its_end(device: torch.device) -> None:
    tree = DraftTree.chain(torch.arange(64, device=device).expand(2, -1))
    target = torch.arange(1, 65, device=device).repeat(2, 1)
    target[1, 40] = 0
    path, length, emitted = tree_ops.accept_path(tree.tokens, tree.parents, target, 64)
    assert length.tolist() == [64, 41]
    assert path[0].tolist() == list(range(64))
    assert emitted[1].tolist() == [*range(1, 41), *[0] * 24]


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    """Slices of wider tensors give the same bits as copies of them."""
    wide = torch.randn(3, 4, 9, device=device).log_softmax(-1)
    tokens = torch.randint(0, 50, (3, 4, 9), device=device)
    pools = [Pool.empty(wide[:, 0, :4], 2) for _ in range(2)]
    for pool, copy in zip(pools, (lambda x: x, Tensor.contiguous), strict=True):
        beam = tree_ops.expand(copy(tokens[:, :1, 1:5]), copy(wide[:, :1, 1:5]), None, pool, 1)
        assert tree_ops.expand(copy(tokens[:, :, ::2][..., :4]), copy(wide[..., 2:6]), beam, pool, 2) is None
    for sliced, copied in zip(*pools, strict=True):
        assert_close(sliced, copied, "bitwise")


def test_no_rows_give_no_rows(device: torch.device) -> None:
    values = torch.zeros(0, 2, device=device)
    pool = Pool.empty(values, 1)
    assert tree_ops.expand(values.long().unsqueeze(1), values.unsqueeze(1), None, pool, 1) is None
    root = torch.zeros(0, dtype=torch.int64, device=device)
    assert tree_ops.rerank(root, pool, 2, 3)[0].shape == (0, 3)
    assert tree_ops.accept_path(*[root.view(0, 1)] * 3, 1)[0].shape == (0, 1)


def test_refusals_say_what_is_wrong(device: torch.device) -> None:
    values = torch.zeros(1, 1, 2, device=device)
    pool = Pool.empty(values[0], 1)
    with pytest.raises(AssertionError, match="float32 or float64"):
        tree_ops.expand(values.long(), values.bfloat16(), None, pool, 1)
    with pytest.raises(AssertionError, match="level 1 hangs on the root"):
        tree_ops.expand(values.long(), values, None, pool, 2)
    with pytest.raises(AssertionError, match="4 nodes do not fit 2 candidates"):
        tree_ops.rerank(torch.zeros(1, dtype=torch.int64, device=device), pool, 2, 4)
    with pytest.raises(AssertionError, match="int64"):
        tree_ops.accept_path(*[torch.zeros(1, 2, device=device)] * 3, 1)
