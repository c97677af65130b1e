"""Both attention ops against softmax over the visible entries, written node by node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels.ref import attention
from nextn.kernels.ref.attention import prefill_attention, tree_attention, tree_view
from tests.compare import Kind, assert_close

HEADS, LORA, ROPE = 2, 6, 4
WIDTH, SCALE = LORA + ROPE, 0.37
NAN = float("nan")


def signed(bits: int) -> int:
    """A set of 64 bits as a signed integer."""
    return bits - (1 << 64) if bits >> 63 else bits


def random_cache(
    lengths: list[int], page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache layer of shuffled pages with NaN in every unused slot, its table, and each row's entries."""
    counts = [-(-length // page_size) for length in lengths]
    order = (torch.randperm(sum(counts) + 2) + 1).tolist()
    cache = torch.full((sum(counts) + 4, page_size, WIDTH), NAN, dtype=dtype)
    table = torch.full((len(lengths), max(counts, default=0) + 1), 10**9)
    rows = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int64)
        entries = torch.randn(length, WIDTH).to(dtype)
        for position in range(length):
            cache[pages[position // page_size], position % page_size] = entries[position]
        rows.append(entries)
    return cache, table, rows


def attend(q: Tensor, entries: Tensor) -> Tensor:
    """One node's absorbed attention in float64.  # [H, C], [n, C] -> [H, LORA]"""
    scores = q.double() @ entries.double().T * SCALE
    return scores.softmax(-1) @ entries.double()[:, :LORA]


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float64, "fp64"), (torch.float32, "fp32-op"), (torch.bfloat16, "bf16-op")]
)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_nodes_see_their_prefix_and_their_bits(dtype: torch.dtype, kind: Kind, page_size: int) -> None:
    """Unequal prefixes, none at all, NaN in unused slots and in tail entries that nobody names."""
    lengths, nodes, tail_len = [0, 5, 70], 3, 7
    cache, table, rows = random_cache(lengths, page_size, dtype)
    q, tail = torch.randn(3, nodes, HEADS, WIDTH).to(dtype), torch.randn(3, tail_len, WIDTH).to(dtype)
    sets = [[[0], [0, 4], [0, 4, 5]], [[1], [2], [3]], [[0, 6], [1, 6], [2, 6]]]
    for row, bits in enumerate(sets):
        unnamed = set(range(tail_len)) - {bit for node in bits for bit in node}
        tail[row, list(unnamed)] = NAN
    mask = torch.tensor([[sum(1 << bit for bit in node) for node in row] for row in sets])
    out = tree_attention(q, cache, table, torch.tensor(lengths), tail, mask, SCALE, LORA)
    assert out.dtype == dtype
    for row in range(3):
        for node in range(nodes):
            expected = attend(q[row, node], torch.cat((rows[row], tail[row, sets[row][node]])))
            assert_close(out[row, node], expected.to(dtype), kind, what=f"row {row} node {node}")


@given(seed=st.integers(0, 10**6), tail_len=st.sampled_from([1, 2, 33, 63, 64]), length=st.integers(0, 9))
def test_any_set_of_64_bits(seed: int, tail_len: int, length: int) -> None:
    """Random masks, bit 63 included, which is the sign of an int64."""
    torch.manual_seed(seed)
    cache, table, rows = random_cache([length], 4, torch.float64)
    q = torch.randn(1, 4, HEADS, WIDTH, dtype=torch.float64)
    tail = torch.randn(1, tail_len, WIDTH, dtype=torch.float64)
    chosen = torch.rand(4, tail_len) < 0.5
    chosen[:, -1] = True
    sets = [row.nonzero().flatten().tolist() for row in chosen]
    mask = torch.tensor([[signed(sum(1 << bit for bit in bits)) for bits in sets]])
    out = tree_attention(q, cache, table, torch.tensor([length]), tail, mask, SCALE, LORA)
    for node, bits in enumerate(sets):
        expected = attend(q[0, node], torch.cat((rows[0], tail[0, bits])))
        assert_close(out[0, node], expected, "fp64")


def test_rows_of_nan_do_not_leak() -> None:
    """A padded row whose query and tail are NaN leaves the other rows' bits as they are."""
    cache, table, _ = random_cache([6, 0], 4, torch.float32)
    q, tail = torch.randn(2, 2, HEADS, WIDTH), torch.randn(2, 2, WIDTH)
    mask, lengths = torch.tensor([[1, 3], [1, 2]]), torch.tensor([6, 0])
    clean = tree_attention(q, cache, table, lengths, tail, mask, SCALE, LORA)
    q[1], tail[1] = NAN, NAN
    assert_close(tree_attention(q, cache, table, lengths, tail, mask, SCALE, LORA)[0], clean[0], "bitwise")


def test_a_shared_view_changes_nothing() -> None:
    """What tree_view returns once for all layers gives the same bits as leaving it out."""
    cache, table, _ = random_cache([6, 3], 4, torch.float32)
    q, tail = torch.randn(2, 2, HEADS, WIDTH), torch.randn(2, 2, WIDTH)
    mask, lengths = torch.tensor([[1, 3], [1, 2]]), torch.tensor([6, 3])
    view = tree_view(table, lengths, mask, page_size=4, tail_len=2, dtype=q.dtype)
    arguments = (q, cache, table, lengths, tail, mask, SCALE, LORA)
    assert_close(tree_attention(*arguments, view=view), tree_attention(*arguments), "bitwise")


def test_both_forms_of_dead_entries_blank_the_same() -> None:
    """A mask, as on a GPU, and numbers, as on a CPU: exactly what no node sees becomes 0."""
    lengths, mask = torch.tensor([6, 3]), torch.tensor([[1, 3], [4, 4]])
    _, table, _ = random_cache([6, 3], 4, torch.float32)
    view = tree_view(table, lengths, mask, page_size=4, tail_len=3, dtype=torch.float32)
    entries = torch.ones(2, table.shape[1] * 4 + 3, 2)
    expected = torch.zeros_like(entries)
    expected[0, :6], expected[1, :3] = 1, 1
    expected[0, -3:-1], expected[1, -1] = 1, 1
    hidden = expected[..., 0].eq(0).flatten()
    for dead in (hidden, hidden.nonzero().flatten()):
        blanked = replace(view, dead=dead).blank(entries.flatten(0, 1).clone())
        assert_close(blanked.view(entries.shape), expected, "bitwise")
    assert view.dead.is_cuda or torch.equal(view.dead, hidden.nonzero().flatten())


def test_without_pages() -> None:
    """A table of no columns is a batch without prefixes."""
    q, tail = torch.randn(1, 1, HEADS, WIDTH), torch.randn(1, 1, WIDTH)
    cache, table = torch.full((2, 4, WIDTH), NAN), torch.zeros(1, 0).long()
    out = tree_attention(q, cache, table, torch.tensor([0]), tail, torch.tensor([[1]]), SCALE, LORA)
    assert_close(out[0, 0], tail[0, 0, :LORA].expand(HEADS, -1), "fp32-op")


NOPE, VALUE = 5, 3


def prefill_case(prefixes: list[int], new: list[int], page_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of prefill_attention, and each request's cached entries under 'rows'."""
    cache, table, rows = random_cache(prefixes, page_size, dtype)
    total = sum(new)
    return {
        "q": torch.randn(total, HEADS, NOPE + ROPE).to(dtype),
        "cache_layer": cache,
        "page_table": table,
        "cu_seqlens": tuple(torch.tensor([0, *new]).cumsum(0).tolist()),
        "prefix_lens": tuple(prefixes),
        "latents": torch.randn(total, WIDTH).to(dtype),
        "w_uk": torch.randn(HEADS, NOPE, LORA).to(dtype),
        "w_uv": torch.randn(HEADS, VALUE, LORA).to(dtype),
        "scale": SCALE,
        "rows": rows,
    }


def expected_prefill(case: dict[str, Any]) -> Tensor:
    """Expanded keys and values, one query at a time, in float64."""
    out = []
    for row, cached in enumerate(case["rows"]):
        begin, end = case["cu_seqlens"][row : row + 2]
        entries = torch.cat((cached, case["latents"][begin:end])).double()
        keys = torch.einsum("nc,hdc->hnd", entries[:, :LORA], case["w_uk"].double())
        keys = torch.cat((keys, entries[:, LORA:].expand(HEADS, -1, -1)), -1)
        values = torch.einsum("nc,hdc->hnd", entries[:, :LORA], case["w_uv"].double())
        for step in range(end - begin):
            seen = len(cached) + step + 1
            scores = torch.einsum("hd,hnd->hn", case["q"][begin + step].double(), keys[:, :seen]) * SCALE
            out.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values[:, :seen]))
    return torch.stack(out)


@pytest.mark.parametrize("blocks", [(512, 1024), (2, 3), (1, 1), (4, 2)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefill_is_causal_over_prefix_and_chunk(
    blocks: tuple[int, int], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests with and without prefixes, however queries and keys are cut into blocks."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(attention, "KEY_BLOCK", blocks[1])
    case = prefill_case([0, 6, 3], [5, 1, 4], page_size, torch.float64)
    expected = expected_prefill(case)
    del case["rows"]
    assert_close(prefill_attention(**case), expected, "fp64")


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "fp32-op"), (torch.bfloat16, "bf16-op")])
def test_prefill_in_narrow_dtypes(dtype: torch.dtype, kind: Kind) -> None:
    """The result has q's dtype and float32's accuracy inside."""
    case = prefill_case([5], [4], 4, dtype)
    expected = expected_prefill(case).to(dtype)
    del case["rows"]
    actual = prefill_attention(**case)
    assert actual.dtype == dtype
    if dtype == torch.float32:
        assert_close(actual, expected, kind)
    else:
        # Keys and values are rounded to bfloat16 when they are expanded, then their products are not.
        error = (actual.double() - expected.double()).abs().max()
        assert error < 2.0**-5 * expected.double().abs().max()
