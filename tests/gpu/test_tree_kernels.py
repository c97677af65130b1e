"""The kernels between forwards at real sizes on the device: trees, children and picks equal their twins."""

from __future__ import annotations

import pytest
import torch

from nextn.config import SpecConfig
from nextn.kernels import tree_ops, vocab
from nextn.kernels.ref import sampling as ref_sampling
from nextn.kernels.ref import tree_ops as ref_tree_ops
from nextn.kernels.ref.sampling import NO_TOKEN
from tests.compare import assert_close
from tests.kernels.test_tree_kernels import check
from tests.kernels.test_vocab import batch_of, noise_of
from tests.strategies import Knobs, TableDraft

pytestmark = pytest.mark.gpu
VOCABS = (16_160, 129_280)


@pytest.mark.parametrize("shape", ["2/4/4", "5/8/64", "3/32/64", "2/64/64", "63/1/64"])
def test_growth_of_many_rows(shape: str) -> None:
    """Ties in plenty, 64 rows at once; the naive version judges every row."""
    spec = SpecConfig.parse(shape)
    rows = 64 if spec.pool_size < 500 else 4
    check(spec, TableDraft(torch.randint(-80, 1, (rows, 7, spec.topk + 3)) / 8))


def test_accept_walks_of_many_rows() -> None:
    tokens = torch.randint(0, 3, (512, 64), device="cuda")
    parents = torch.arange(64, device="cuda").expand(512, -1) // 3 - 1
    tokens[:, 1:] = (torch.arange(63, device="cuda") % 3).expand(512, -1)  # siblings are distinct
    target = torch.randint(-1, 4, (512, 64), device="cuda")
    actual = tree_ops.accept_path(tokens, parents, target, 6)
    for tensor, twin in zip(actual, ref_tree_ops.accept_path(tokens, parents, target, 6), strict=True):
        assert_close(tensor, twin, "bitwise")


def _logits(rows: int, nodes: int, size: int) -> torch.Tensor:
    """In steps of 1/64, as bfloat16 leaves them: many ties; one node has nothing, one only its last token."""
    logits = (3 * torch.randn(rows, nodes, size, device="cuda") * 64).round() / 64
    logits[0, 0] = torch.nan
    logits[1, 0, :-1] = -torch.inf
    return logits


@pytest.mark.parametrize("size", VOCABS)
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0, 0.3, 0.05)])
def test_children_of_a_real_vocabulary(size: int, temperatures: tuple[float, ...]) -> None:
    """Greedy tokens are the twin's; sampled ones too but where two scores are equal to rounding."""
    rows = [Knobs(temperatures[r % len(temperatures)], seed=r) for r in range(8)]
    batch = batch_of(rows, size)
    noise = noise_of(batch, 1, size, torch.float32)
    logits = _logits(8, 4, size)
    tokens, values = vocab.best_children(logits, batch, noise, 8, 0.8)
    expected, expected_values = ref_sampling.best_children(logits, batch, noise.nan_to_num(0.0), 8, 0.8)
    assert_close(values, expected_values, "fp32-op", what="values")
    greedy = batch.temperature == 0
    assert_close(tokens[greedy], expected[greedy], "bitwise", what="greedy tokens")
    assert (tokens != expected).float().mean() < 0.01


@pytest.mark.parametrize("size", VOCABS)
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0, 0.3, 0.05)])
def test_picks_of_a_real_vocabulary(size: int, temperatures: tuple[float, ...]) -> None:
    rows = [Knobs(temperatures[r % len(temperatures)], seed=r) for r in range(8)]
    batch = batch_of(rows, size)
    noise = noise_of(batch, 3, size, torch.float32)
    logits, level = _logits(8, 16, size), torch.randint(3, (8, 16), device="cuda")
    picked = vocab.pick_tokens(logits, batch, noise, level)
    assert_close(picked, ref_sampling.pick_tokens(logits, batch, noise.nan_to_num(0.0), level), "bitwise")
    assert picked[:2, 0].tolist() == [NO_TOKEN, size - 1]


@pytest.mark.parametrize("size", VOCABS)
def test_noise_of_a_cycle(size: int) -> None:
    batch = batch_of([Knobs(0.0), Knobs(0.7, seed=-5, choice=3)], size)
    first = torch.tensor([5, 163_000], device="cuda")
    actual = vocab.level_noise(batch, first, 3, size, torch.float32)
    assert_close(actual, ref_sampling.level_noise(batch, first, 3, size, torch.float32), "fp32-op")


def test_a_captured_cycle_replays_on_new_data() -> None:
    """One graph from children to acceptance: new logits in the same memory give the results of new calls."""
    spec, size = SpecConfig(2, 4, 4), 16_160
    batch = batch_of([Knobs(0.0), Knobs(0.9, seed=3)], size)
    first = torch.tensor([9, 70], device="cuda")
    root = torch.tensor([1, 2], device="cuda")
    logits = [torch.randn(2, nodes, size, device="cuda") for nodes in (1, 4, 4)]

    def cycle() -> tuple[torch.Tensor, ...]:
        noise = vocab.level_noise(batch, first, 3, size, torch.float32)
        tokens, values = vocab.best_children(logits[0], batch, noise[:, :1], 4)
        pool = ref_tree_ops.Pool.empty(values[:, 0], 2)
        beam = tree_ops.expand(tokens, values, None, pool, 1)
        tree_ops.expand(*vocab.best_children(logits[1], batch, noise[:, 1:2], 4), beam, pool, 2)
        tree = tree_ops.rerank(root, pool, 4, 4)
        target = vocab.pick_tokens(logits[2], batch, noise, tree[2])
        return (*tree, *tree_ops.accept_path(tree[0], tree[1], target, spec.width))

    cycle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cycle()
    for _ in range(2):
        for each in logits:
            each.copy_(torch.randn_like(each))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for tensor, fresh in zip(replayed, cycle(), strict=True):
            assert_close(tensor, fresh, "bitwise")
