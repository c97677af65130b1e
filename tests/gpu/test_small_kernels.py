"""Norms, cache entries and absorbed queries on a GPU at DeepSeek-V3's sizes: twins, graphs, rows alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nextn.kernels import mla, norm
from nextn.kernels.ref import mla as ref_mla
from nextn.kernels.ref import norm as ref_norm
from nextn.kernels.ref.rope import RotaryTables, plain_frequencies, rope_table
from tests.compare import assert_close

pytestmark = pytest.mark.gpu
HIDDEN, Q_LORA, KV_LORA, ROPE, NOPE, V = 7168, 1536, 512, 64, 128, 128
EPS = 1e-6


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def bf16(*shape: int) -> Tensor:
    return normal(*shape).bfloat16()


def tables(interleave: bool = True) -> RotaryTables:
    frequencies, device = plain_frequencies(ROPE, 1e4), torch.device("cuda")
    return RotaryTables(*rope_table(frequencies, 1.0, 4096, dtype=torch.bfloat16, device=device), interleave)


def positions_of(count: int) -> Tensor:
    return torch.randint(4096, (count,), device="cuda")


def replayed(call: Callable[[], object], change: Callable[[], None]) -> None:
    """Capture the call, change its inputs in place, replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    change()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize(("rows", "parts"), [(1, 14), (4, 9), (64, 4), (4096, 1)])
def test_add_norm_equals_its_twin(rows: int, parts: int) -> None:
    residual, summands, weight = bf16(rows, HIDDEN), normal(parts, rows, HIDDEN), bf16(HIDDEN)
    valid = torch.rand(rows, device="cuda") < 0.7
    summands[:, ~valid] = torch.nan
    actual = norm.add_norm(residual, summands, weight, EPS, valid)
    expected = ref_norm.add_norm(residual, summands, weight, EPS, valid)
    assert_close(actual[0], expected[0], "bitwise", what="residual")
    assert_close(actual[1], expected[1], "bf16-op", what="normed")


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    """Alone, among 64 and among 1000."""
    residual, summands, weight = bf16(1000, HIDDEN), normal(3, 1000, HIDDEN), bf16(HIDDEN)
    most = norm.add_norm(residual, summands, weight, EPS)[1]
    for rows in (1, 64):
        few = norm.add_norm(residual[:rows], summands[:, :rows], weight, EPS)[1]
        assert_close(few, most[:rows], "bitwise")


def test_rms_norm_and_join_norms_equal_their_twins() -> None:
    embedding, hidden, enorm, hnorm = bf16(5, HIDDEN), bf16(5, HIDDEN), bf16(HIDDEN), bf16(HIDDEN)
    assert_close(norm.rms_norm(hidden, hnorm, EPS), ref_norm.rms_norm(hidden, hnorm, EPS), "bf16-op")
    args = (embedding, hidden, enorm, hnorm, EPS)
    assert_close(norm.join_norms(*args), ref_norm.join_norms(*args), "bf16-op")


@pytest.mark.parametrize(("rows", "parts", "half"), [(1, 14, 256), (4, 14, 2304), (2000, 1, 18432)])
def test_silu_and_mul_equals_its_twin(rows: int, parts: int, half: int) -> None:
    """Gates whose exponential overflows give zero."""
    summands = normal(parts, rows, 2 * half)
    summands[0, 0, :8] = torch.tensor([-1e4, -200, -100, -88, -20, 0, 1, 20], device="cuda")
    expected = ref_norm.silu_and_mul_summands(summands).bfloat16()
    assert_close(norm.silu_and_mul_summands(summands), expected, "bf16-op")


@pytest.mark.parametrize(("nodes", "parts", "q_lora"), [(1, 14, Q_LORA), (16, 7, Q_LORA), (500, 1, 0)])
@pytest.mark.parametrize("interleave", [True, False])
def test_prepare_latents_equals_its_twin(nodes: int, parts: int, q_lora: int, interleave: bool) -> None:
    count, width = 4 * nodes, KV_LORA + ROPE
    summands = normal(parts, count, q_lora + width)
    slots = torch.randperm(40 * 64, device="cuda")[:count]
    valid = torch.rand(count, device="cuda") < 0.7
    given = (bf16(q_lora) if q_lora else None, bf16(KV_LORA), EPS, tables(interleave), positions_of(count))
    results = []
    for op in (mla.prepare_latents, ref_mla.prepare_latents):
        cache = torch.zeros(40, 64, width, dtype=torch.bfloat16, device="cuda")
        tail = torch.zeros(4, nodes + 3, width, dtype=torch.bfloat16, device="cuda")
        q_in = op(summands, *given, slots, valid, cache, tail[:, 2 : nodes + 2])
        results.append((cache, tail, cache if q_in is None else q_in))
    for actual, expected, what in zip(*results, ("cache", "tail", "q_in"), strict=True):
        assert_close(actual, expected, "bf16-op", what=what)


@pytest.mark.parametrize(("heads", "count", "parts"), [(16, 1, 8), (16, 64, 4), (128, 5, 2), (128, 100, 1)])
def test_absorb_queries_equals_its_twin(heads: int, count: int, parts: int) -> None:
    summands = normal(parts, count, heads * (NOPE + ROPE))
    w_uk = bf16(heads, NOPE + V, KV_LORA)[:, :NOPE]
    rotary, positions = tables(), positions_of(count)
    actual = mla.absorb_queries(summands, w_uk, rotary, positions)
    expected = ref_mla.absorb_queries(summands, w_uk, rotary, positions)
    assert_close(actual, expected, "bf16-op")
    alone = mla.absorb_queries(summands[:, -1:], w_uk, rotary, positions[-1:])
    assert_close(alone, actual[-1:], "bitwise", what="the last token alone")


def test_a_captured_chain_replays_on_new_data() -> None:
    """Each kernel reads what the one before wrote, so one that starts too early would show."""
    residual, parts, weight = bf16(4, HIDDEN), normal(9, 4, HIDDEN), bf16(HIDDEN)
    norms, heads = (bf16(Q_LORA), bf16(KV_LORA)), 16
    w_uk = bf16(heads, NOPE + V, KV_LORA)[:, :NOPE]
    rotary, positions, slots = tables(), positions_of(4), torch.arange(4, device="cuda")
    cache, tail = (torch.zeros(1, n, KV_LORA + ROPE, device="cuda").bfloat16() for n in (64, 4))
    kept: list[Tensor] = []

    def chain(norm_op, mla_op) -> list[Tensor]:  # type: ignore[no-untyped-def]
        total, normed = norm_op.add_norm(residual, parts, weight, EPS)
        down = normed[:, : Q_LORA + KV_LORA + ROPE][None]
        q_in = mla_op.prepare_latents(down, *norms, EPS, rotary, positions, slots, None, cache, tail)
        q = torch.cat((q_in, q_in), -1)[None].expand(3, -1, -1).contiguous()
        return [total, q_in, mla_op.absorb_queries(q, w_uk, rotary, positions)]

    def change() -> None:
        parts.normal_()
        positions.add_(7).remainder_(4096)

    replayed(lambda: kept.__setitem__(slice(None), chain(norm, mla)), change)
    entries = tail.clone()
    for actual, expected in zip(kept, chain(ref_norm, ref_mla), strict=True):
        assert_close(actual, expected, "bf16-op")
    assert_close(entries, tail, "bf16-op", what="tail")
