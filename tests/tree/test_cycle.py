"""A cycle's functions together: none of them reads a tensor on the host or has a shape that data decide."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nextn.config import SpecConfig
from nextn.kernels.ref import sampling
from nextn.kernels.ref.sampling import SamplingBatch
from nextn.tree import grow
from nextn.tree.accept import Accepted, accept, simulated
from nextn.tree.tree import DraftTree
from tests.compare import assert_close
from tests.strategies import Knobs, sampling_batch

ROWS = [Knobs(0.0), Knobs(0.7, top_k=5, top_p=0.9, min_p=0.1, frequency=0.5, repetition=1.2, seed=3)]


@dataclass(frozen=True)
class Logits:
    """What a model would give at each level of the draft, and for the tree."""

    levels: list[Tensor]  # [B, 1, V], then [B, k, V]
    tree: Tensor  # [B, D, V]

    @staticmethod
    def random(spec: SpecConfig, vocab: int, dtype: torch.dtype) -> Logits:
        nodes = [1, *[spec.topk] * (spec.num_steps - 1), spec.draft_tokens]
        *levels, tree = (3 * torch.randn(len(ROWS), n, vocab, dtype=dtype) for n in nodes)
        return Logits(levels, tree)

    def to(self, device: torch.device) -> Logits:
        return Logits([level.to(device) for level in self.levels], self.tree.to(device))


def cycle(spec: SpecConfig, batch: SamplingBatch, logits: Logits) -> tuple[DraftTree, Accepted]:
    """Draft, verify and accept as an engine does, with the noise made once."""
    b, vocab = logits.tree.shape[0], logits.tree.shape[2]
    first = torch.ones(b, dtype=torch.int64, device=logits.tree.device)
    noise = sampling.level_noise(batch, first, spec.num_steps + 1, vocab, logits.tree.dtype)

    def children(path: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        level = path.shape[2]
        logp = sampling.process_logits(logits.levels[level], batch, path, valid)
        scores = logp + noise[:, level : level + 1]
        return grow.top_children(scores, sampling.child_values(scores, logp, batch), spec.topk)

    tokens, values = children(*DraftTree.plain(first).path_tokens())
    growth = grow.start(tokens[:, 0], values[:, 0], spec)
    while growth.level < spec.num_steps:
        beam = growth.beam()
        growth.extend(*children(beam.path_tokens, beam.path_valid))
    tree = growth.rerank(first)
    logp = sampling.process_logits(logits.tree, batch, *tree.path_tokens())
    target = sampling.pick(sampling.add_noise(logp, noise, tree.depth))
    return tree, accept(tree, target, spec.width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", ["2/4/4", "3/3/8", "3/1/4", "1/2/3"])
def test_cycle_runs_on_tensors_without_data(shape: str, dtype: torch.dtype) -> None:
    """Draft, verify and accept run on fake tensors, which raise on any host read; the shapes are right."""
    spec, b, vocab = SpecConfig.parse(shape), len(ROWS), 33
    with FakeTensorMode(allow_non_fake_inputs=True):
        tree, accepted = cycle(spec, sampling_batch(ROWS, vocab), Logits.random(spec, vocab, dtype))
        pretended = simulated(tree, accepted.length, tree.tokens, spec.width)
        with pytest.raises(DataDependentOutputException):
            accepted.length[0].item()
    assert tree.tokens.shape == tree.mask.shape == tree.logp.shape == (b, spec.draft_tokens)
    assert accepted.tokens.shape == pretended.tokens.shape == accepted.valid.shape == (b, spec.width)
    assert tree.logp.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [33, 129280])
@pytest.mark.parametrize("shape", ["2/4/4", "3/3/8", "3/8/64"])
def test_graph_of_a_cycle_equals_the_cpu(shape: str, vocab: int, device: torch.device) -> None:
    """Captured in a CUDA graph a cycle gives the CPU's tree and tokens, and new ones for new logits."""
    spec, dtype = SpecConfig.parse(shape), torch.float64
    batch = sampling_batch(ROWS, vocab)
    there = replace(
        batch,
        **{f.name: v.to(device) for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)},
    )
    inputs = Logits.random(spec, vocab, dtype).to(device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cycle(spec, there, inputs)  # warm up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree, accepted = cycle(spec, there, inputs)
    for _ in range(3):
        logits = Logits.random(spec, vocab, dtype)
        for buffer, level in zip(inputs.levels, logits.levels, strict=True):
            buffer.copy_(level)
        inputs.tree.copy_(logits.tree)
        graph.replay()
        expected, emitted = cycle(spec, batch, logits)
        for name in ("tokens", "parents", "depth", "mask"):
            assert_close(getattr(tree, name), getattr(expected, name), "bitwise", what=name)
        assert_close(tree.logp, expected.logp, "fp64", what="logp")
        for name in ("tokens", "path", "length"):
            assert_close(getattr(accepted, name), getattr(emitted, name), "bitwise", what=name)
