"""Tree attention at full size on a CUDA device: against the twin, and replayed in a graph on new data."""

from __future__ import annotations

import pytest
import torch

from nextn.kernels import attention
from tests.compare import assert_close
from tests.kernels.test_attention import Case, make_case

pytestmark = pytest.mark.gpu
FULL = {"kv_lora": 512, "rope": 64, "value_dim": 128}


def _assert_matches(case: Case) -> None:
    case.q *= 0.1  # scores of a model's size
    assert_close(case.run(), case.expected(), "bf16-attention")


@pytest.mark.parametrize("page_size", [1, 7, 64, 128])
@pytest.mark.parametrize("nodes", [1, 4, 8])
def test_rows_of_mixed_lengths_match_the_twin(page_size: int, nodes: int) -> None:
    _assert_matches(make_case([3000, 0, 17, 64, 1025], nodes, 16, page_size=page_size, **FULL))


@pytest.mark.parametrize(("rows", "context", "nodes"), [(16, 12288, 4), (1, 131072, 4), (1, 1024, 1)])
def test_long_contexts_match_the_twin(rows: int, context: int, nodes: int) -> None:
    _assert_matches(make_case([context - row for row in range(rows)], nodes, 16, page_size=64, **FULL))


@pytest.mark.parametrize(("rows", "nodes"), [(33, 4), (64, 1), (100, 4)])
def test_many_rows_match_the_twin(rows: int, nodes: int) -> None:
    """More than 32, whose places in the plan one warp does not hold."""
    _assert_matches(make_case([97 * row % 900 for row in range(rows)], nodes, 16, page_size=64, **FULL))


@pytest.mark.parametrize("kv_lora", [128, 256])
def test_narrower_latents_match_the_twin(kv_lora: int) -> None:
    _assert_matches(make_case([900, 0, 65], 4, 16, page_size=64, **FULL | {"kv_lora": kv_lora}))


def test_the_same_inputs_give_the_same_bits() -> None:
    """Whatever order the programs of a device come in."""
    case = make_case([3000, 17, 1025, 12288], 4, 16, page_size=64, **FULL)
    first = case.run()
    for _ in range(20):
        assert_close(case.run(), first, "bitwise")


@pytest.mark.parametrize("heads", [4, 128])
def test_few_and_all_heads_with_a_long_tail_match_the_twin(heads: int) -> None:
    _assert_matches(make_case([700, 90], 8, heads, page_size=64, tail_len=64, **FULL))


def test_a_graph_replays_on_new_queries_and_lengths() -> None:
    case = make_case([900, 1, 300], 4, 16, page_size=64, **FULL)

    def step() -> torch.Tensor:
        plan = attention.plan_attention(case.prefix_lens, 4)
        return attention.decode_attention(*case.args(), plan=plan)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert_close(out, case.expected(), "bf16-attention")
    case.q.copy_(torch.randn_like(case.q))
    case.prefix_lens.copy_(torch.tensor([640, 0, 299], device=out.device))
    graph.replay()
    assert_close(out, case.expected(), "bf16-attention")
