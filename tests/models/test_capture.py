"""What a CUDA graph needs of a decode, shown on a CPU that passes for a GPU: no reads by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nextn.models.inputs import DraftInput
from tests.compare import assert_close
from tests.models.build import Tiny, Tree, build, prefill, random_tokens, small_dict

HOST_READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::item", "aten::repeat_interleave.Tensor", "aten::_unique2",
}  # fmt: skip


class NoHostReads(TorchDispatchMode):
    """Raises at an operation whose result or shape the host must wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert HOST_READS.isdisjoint((name, f"{name}.{func._overloadname}")), f"{name} would synchronise"
        if name == "aten::index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean index"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the branches that CUDA tensors take, with the plain-torch twins of kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def tree_case(tiny: Tiny) -> tuple[Any, Tensor]:
    """A verification of two rows with padded nodes, on top of two prefixes; input and cache."""
    pool = tiny.pool()
    torch.manual_seed(3)
    prefill(tiny, pool, [random_tokens(tiny, 5), random_tokens(tiny, 9)], [0, 0])
    trees = [Tree([1, 2, 3, 4], [-1, 0, 0, 1]), Tree([7, 8], [-1, 0])]
    return pool.tree_input(trees, [5, 9]), pool.cache


def draft_case(tiny: Tiny) -> tuple[DraftInput, Tensor, Tensor]:
    """A beam of two for two rows; input, parents' states and cache."""
    inp, cache = tree_case(tiny)
    cache[-1] = torch.where(cache[-2].isnan(), cache[-2], torch.randn_like(cache[-2]))
    tail = torch.full((2, 4, tiny.cfg.latent_dim), float("nan"), dtype=tiny.dtype)
    mask = torch.tensor([[1, 2], [1, 2]])
    tokens, positions = inp.tokens[:, :2], inp.positions[:, :2]
    level = DraftInput(tokens, positions, mask, tail, 0, inp.prefix_lens, inp.page_table)
    return level, torch.randn(2, 2, tiny.cfg.hidden_size, dtype=tiny.dtype), cache


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_a_gpus_decode_reads_nothing_on_the_host(keep_fp8: bool, request: pytest.FixtureRequest) -> None:
    """Its branches give the CPU's numbers for valid nodes, the same cache, and finite padding."""
    tiny = build(small_dict(num_nextn_predict_layers=1), dtype=torch.float64, keep_fp8=keep_fp8)
    inp, cache = tree_case(tiny)
    expected, expected_cache = tiny.target.decode(inp, cache).hidden, cache
    level, parents, draft_cache = draft_case(tiny)
    expected_draft = tiny.draft.decode(level, parents, draft_cache).hidden
    inp, cache = tree_case(tiny)
    level.tail.fill_(float("nan"))
    request.getfixturevalue("as_on_a_gpu")
    with NoHostReads():
        actual = tiny.target.decode(inp, cache).hidden
        logits = tiny.logits(actual)
        draft = tiny.draft.decode(level, parents, draft_cache).hidden
    request.getfixturevalue("monkeypatch").undo()
    assert logits.isfinite().all()
    assert_close(actual[inp.valid], expected[inp.valid], "fp64")
    assert_close(cache, expected_cache, "fp64")
    assert_close(draft, expected_draft, "fp64")


def test_the_guard_sees_host_reads() -> None:
    """The mode itself refuses item, truth values, nonzero and boolean indexing."""
    x = torch.arange(4)
    for read in (lambda: x[0].item(), lambda: bool(x[1] > 0), lambda: x.nonzero(), lambda: x[x > 1]):
        with pytest.raises(AssertionError), NoHostReads():
            read()
    with pytest.raises(AssertionError), NoHostReads():
        x[x.argmax()]
