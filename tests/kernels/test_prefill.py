"""Prefill attention's kernels against their twin, and the division of a prefill into parts and tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nextn.kernels import prefill
from nextn.kernels.prefill import PrefillConfig, PrefillSizes, plan_prefill_attention, prefill_attention
from nextn.kernels.ref.attention import prefill_attention as twin
from tests.compare import assert_close

NAN = float("nan")
POINTERS, TMA = PrefillConfig(16, 16, 4, 2, False), PrefillConfig(16, 16, 4, 2, True)


class Shape(NamedTuple):
    """One layer's sizes."""

    heads: int = 2
    nope: int = 8
    rope: int = 4
    v: int = 8
    lora: int = 16


TINY, WHOLE, ODD = Shape(), Shape(3, 16, 16, 32, 24), Shape(1, 24, 8, 5, 20)


def inputs(
    chunks: list[int], prefixes: list[int], shape: Shape, page_size: int, device: torch.device
) -> dict[str, Any]:
    """Arguments of the op: shuffled pages, NaN in every slot outside a prefix, absurd unused page numbers."""
    width = shape.lora + shape.rope
    counts = [-(-prefix // page_size) for prefix in prefixes]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    cache = torch.full((sum(counts) + 2, page_size, width), NAN)
    table = torch.full((len(prefixes), max(counts, default=0) + 1), 10**12)
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int64)
        for position in range(prefix):
            cache[pages[position // page_size], position % page_size] = torch.randn(width)
    ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
    kv_b = torch.randn(shape.heads, shape.nope + shape.v, shape.lora) * shape.lora**-0.5
    kv_b = kv_b.bfloat16().to(device)
    return {
        "q": torch.randn(ends[-1], shape.heads, shape.nope + shape.rope).bfloat16().to(device),
        "cache_layer": cache.bfloat16().to(device),
        "page_table": table.to(device),
        "cu_seqlens": tuple(ends),
        "prefix_lens": tuple(prefixes),
        "latents": torch.randn(ends[-1], width).bfloat16().to(device),
        "w_uk": kv_b[:, : shape.nope],
        "w_uv": kv_b[:, shape.nope :],
        "scale": 0.4,
    }


def sizes_of(shape: Shape) -> PrefillSizes:
    return PrefillSizes(shape.heads, shape.nope, shape.v, shape.lora + shape.rope)


@pytest.mark.parametrize("shape", [TINY, WHOLE, ODD], ids=["tiny", "whole", "odd"])
@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_token_attends_its_prefix_and_what_precedes_it(shape, config, page_size, device):
    """Chunks and prefixes below, at and above the tile sizes, none at all, in one batch."""
    args = inputs([1, 16, 35, 3], [0, 7, 21, 16], shape, page_size, device)
    out = prefill_attention(**args, config=config._replace(descriptors=config.descriptors and shape == WHOLE))
    assert_close(out, twin(**args), "bf16-attention")


@pytest.mark.parametrize("shape", [TINY, WHOLE], ids=["tiny", "whole"])
def test_the_default_configuration_serves_short_and_long_chunks(shape, device):
    for chunks, prefixes in (([5, 64], [3, 0]), ([70], [130])):
        args = inputs(chunks, prefixes, shape, 64, device)
        assert_close(prefill_attention(**args), twin(**args), "bf16-attention")


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4),
    block_m=st.sampled_from([16, 32]),
    block_n=st.sampled_from([16, 32]),
)
def test_any_mix_of_chunks_and_prefixes(lengths, block_m, block_n, device):
    args = inputs([chunk for chunk, _ in lengths], [prefix for _, prefix in lengths], TINY, 4, device)
    out = prefill_attention(**args, config=POINTERS._replace(block_m=block_m, block_n=block_n))
    assert_close(out, twin(**args), "bf16-attention")


def test_parts_and_groups_of_heads_change_no_bit(device, monkeypatch):
    """A workspace for one head of about one request, against everything at once."""
    shape = Shape(heads=3)
    args = inputs([20, 5, 9], [3, 30, 0], shape, 4, device)
    whole = prefill_attention(**args, config=POINTERS)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 2 * 50 * (20 + 16))
    plan = plan_prefill_attention(
        args["cu_seqlens"], args["prefix_lens"], sizes_of(shape), device, config=POINTERS
    )
    assert [part.requests for part in plan.parts] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert [part.heads for part in plan.parts] == [2, 1, 3]
    assert_close(prefill_attention(**args, plan=plan), whole, "bitwise")


CUT = PrefillConfig(16, 16, 4, 2, False, piece=32)


def every_way_to_cut(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Cut every tile into up to `cut` pieces, as far as it has keys for them."""
    monkeypatch.setattr(prefill, "_cut", lambda programs, keys, piece, sms: max(1, min(cut, keys // piece)))


@pytest.mark.parametrize("shape", [TINY, WHOLE, ODD], ids=["tiny", "whole", "odd"])
@pytest.mark.parametrize("cut", [2, 3, 16])
def test_tiles_cut_into_pieces_of_their_keys_give_the_same(shape, cut, device, monkeypatch):
    """Beside tiles that are not; the diagonal on, before and behind a piece's bound."""
    every_way_to_cut(monkeypatch, cut)
    for chunks, prefixes in (([1, 40, 5], [63, 100, 8]), ([17], [111]), ([16], [64])):
        args = inputs(chunks, prefixes, shape, 4, device)
        plan = plan_prefill_attention(
            args["cu_seqlens"], args["prefix_lens"], sizes_of(shape), device, config=CUT
        )
        assert all(part.merges for part in plan.parts)
        assert_close(prefill_attention(**args, plan=plan), twin(**args), "bf16-attention")


def test_pieces_come_by_tma_too(device, monkeypatch):
    every_way_to_cut(monkeypatch, 3)
    args = inputs([20, 3], [90, 70], WHOLE, 4, device)
    out = prefill_attention(**args, config=TMA._replace(piece=32))
    assert_close(out, twin(**args), "bf16-attention")


@given(
    chunk=st.integers(1, 300),
    prefix=st.integers(0, 3000),
    cut=st.integers(1, 16),
    block=st.sampled_from([16, 32, 64]),
)
def test_pieces_cover_a_tile_s_keys_once_and_begin_where_all_its_queries_see(chunk, prefix, cut, block):
    request = prefill._Request(0, chunk, prefix, 0, cut, 0)
    for start in range(0, chunk, 64):
        rows, first = min(64, chunk - start), prefix + start
        pieces = request.pieces(rows, first, block)
        assert 1 <= len(pieces) <= cut
        assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
        assert pieces[-1][1] == first + rows
        assert all(begin % block == 0 and begin <= first and begin < end for begin, end in pieces)


@pytest.mark.parametrize(
    ("tiles", "keys", "expected"),
    [
        (1, 4000, 1),
        (1, 100_000, 16),
        (16, 100_000, 8),
        (48, 80_000, 11),
        (144, 51_000, 3),
        (128, 100_000, 1),
        (256, 100_000, 1),
    ],
)
def test_few_tiles_are_cut_so_that_all_processors_work(tiles, keys, expected):
    """Programs run in whole waves: 16 tiles in 8 pieces fill one of 132, 48 in 11 four."""
    assert prefill._cut(tiles, keys, prefill.MIN_PIECE, 132) == expected


def test_how_a_request_is_cut_does_not_depend_on_its_neighbours(device):
    """Alone and in a batch the same pieces, and so the same bits."""
    config = PrefillConfig(16, 16, 4, 2, False, piece=16)
    args = inputs([9, 18, 40], [35, 86, 21], WHOLE, 4, device)
    middle = {
        "q": args["q"][9:27],
        "latents": args["latents"][9:27],
        "page_table": args["page_table"][1:2],
        "cu_seqlens": (0, 18),
        "prefix_lens": (86,),
    }
    many, one = (
        plan_prefill_attention(*lengths, sizes_of(WHOLE), device, config=config, processors=132)
        for lengths in ((args["cu_seqlens"], args["prefix_lens"]), ((0, 18), (86,)))
    )
    assert one.parts[0].merges
    out = prefill_attention(**args, plan=many)
    assert_close(out[9:27], prefill_attention(**args | middle, plan=one), "bitwise")


def test_a_request_s_output_does_not_depend_on_its_neighbours(device):
    """Alone, and between a request that ends in NaN and one that begins with NaN: the same bits."""
    args = inputs([9, 18, 12], [5, 6, 21], WHOLE, 4, device)
    args["latents"][8] = NAN
    args["cache_layer"][args["page_table"][2, 0], 0] = NAN
    middle = {
        "q": args["q"][9:27],
        "latents": args["latents"][9:27],
        "page_table": args["page_table"][1:2],
        "cu_seqlens": (0, 18),
        "prefix_lens": (6,),
    }
    for config in (POINTERS, TMA):
        out = prefill_attention(**args, config=config)
        assert_close(out[9:27], prefill_attention(**args | middle, config=config), "bitwise")


def test_one_plan_serves_every_layer(device):
    """Other queries, entries and weights under the plan of the first; with weights that are no views too."""
    first, second = (inputs([20, 3], [9, 0], TINY, 4, device) for _ in range(2))
    second["w_uk"], second["w_uv"] = second["w_uk"].contiguous(), second["w_uv"].contiguous()
    lengths = (first["cu_seqlens"], first["prefix_lens"])
    plan = plan_prefill_attention(*lengths, sizes_of(TINY), device)
    for args in (first, second):
        assert_close(prefill_attention(**args, plan=plan), twin(**args), "bf16-attention")


def test_strided_queries_and_latents_are_read_in_place(device):
    args = inputs([11], [6], WHOLE, 4, device)
    expected = prefill_attention(**args, config=TMA)
    for name in ("q", "latents"):
        wide = torch.full((*args[name].shape[:-1], args[name].shape[-1] + 8), NAN).bfloat16().to(device)
        wide[..., :-8] = args[name]
        args[name] = wide[..., :-8]
    assert_close(prefill_attention(**args, config=TMA), expected, "bitwise")


def test_no_tokens_give_no_rows(device):
    args = inputs([], [], TINY, 4, device)
    assert prefill_attention(**args).shape == (0, TINY.heads, TINY.v)


def test_tiles_cover_every_token_once_and_the_longest_come_first():
    chunks, prefixes = [70, 1, 33], [5, 900, 0]
    plan = plan_prefill_attention((0, 70, 71, 104), prefixes, sizes_of(TINY), torch.device("cpu"), config=TMA)
    (part,) = plan.parts
    requests = plan.table[: part.piece_row, :4].tolist()
    assert requests == [[0, 70, 5, 0], [70, 1, 900, 80], [71, 33, 0, 992]]
    tiles = plan.table[part.piece_row :].tolist()
    assert len(tiles) == part.pieces
    assert part.slots == part.merges == 0
    tokens = [token for begin, rows, *_ in tiles for token in range(begin, begin + rows)]
    assert sorted(tokens) == list(range(104))
    seen = [first + rows for _, rows, first, *_ in tiles]
    assert seen == sorted(seen, reverse=True)
    assert part.longest == 912
    assert part.entries == sum(-(-(a + b) // 16) * 16 for a, b in zip(chunks, prefixes, strict=True))


@given(
    entries=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    heads=st.integers(1, 40),
    workspace=st.integers(1, 1 << 22),
)
def test_no_part_needs_more_than_the_planner_is_told(entries, heads, workspace):
    sizes = PrefillSizes(heads, 8, 8, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "WORKSPACE_BYTES", workspace)
        ends = torch.tensor([0, *entries]).cumsum(0).tolist()
        plan = plan_prefill_attention(ends, [0] * len(entries), sizes, torch.device("cpu"), config=POINTERS)
        requests = range(len(entries))
        assert [r for part in plan.parts for r in requests[part.requests]] == list(requests)
        longest = max(part.longest for part in plan.parts)
        bound = max(workspace, prefill.workspace_bytes(longest, sizes))
        for part in plan.parts:
            need = 2 * part.entries * (20 + part.heads * 16)
            assert need <= min(bound, prefill.workspace_bytes(sum(p.entries for p in plan.parts), sizes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "scale must be positive"),
        ({"q": torch.zeros(3, 2, 12)}, "q must be bfloat16"),
        ({"prefix_lens": (1, 2)}, "one row a request"),
        ({"cu_seqlens": (0, 2)}, "must span the tokens"),
        ({"page_table": torch.zeros(1, 2, dtype=torch.int32)}, "must be int64"),
    ],
)
def test_bad_arguments_are_named(change, message, device):
    with pytest.raises(AssertionError, match=message):
        prefill_attention(**inputs([3], [2], TINY, 4, device) | change)


def test_a_plan_for_other_sizes_is_refused(device):
    args = inputs([3], [2], TINY, 4, device)
    plan = plan_prefill_attention((0, 3), (2,), sizes_of(TINY), device)
    with pytest.raises(AssertionError, match="the plan is for"):
        prefill_attention(**args, plan=replace(plan, sizes=sizes_of(WHOLE)))
    with pytest.raises(AssertionError, match="has a configuration"):
        prefill_attention(**args, plan=plan, config=TMA)


@pytest.mark.parametrize(("chunks", "prefixes"), [((0, 3), (1,)), ((0, 1, 3), (2, 2)), ((0, 4), (2,))])
def test_a_plan_for_other_lengths_is_refused(chunks, prefixes, device):
    """Its tables would leave tokens out or read others' entries, and say nothing."""
    plan = plan_prefill_attention(chunks, prefixes, sizes_of(TINY), device)
    with pytest.raises(AssertionError, match="other lengths"):
        prefill_attention(**inputs([3], [2], TINY, 4, device), plan=plan)
