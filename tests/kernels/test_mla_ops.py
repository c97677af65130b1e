"""Cache entries and absorbed queries: kernels against twins, and twins against the layer's own steps."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.kernels import mla
from nextn.kernels.ref import mla as ref
from nextn.kernels.ref.rope import RotaryTables, apply_rope, plain_frequencies, rope_rows, rope_table
from tests.compare import assert_close
from tests.conftest import HAS_CUDA, poison_

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")
EPS, PAGE, MAX_POSITIONS = 1e-6, 4, 50


class Sizes(NamedTuple):
    """q_lora 0 stands for a model without q_a."""

    q_lora: int
    kv_lora: int
    rope: int
    nope: int
    heads: int


SMALL = Sizes(q_lora=24, kv_lora=16, rope=4, nope=8, heads=2)
ODD = Sizes(q_lora=0, kv_lora=20, rope=6, nope=17, heads=3)
WIDE = Sizes(q_lora=96, kv_lora=144, rope=64, nope=32, heads=1)
ALL = [SMALL, ODD, WIDE]


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=WHERE).bfloat16()


def tables(rope: int, interleave: bool, dtype: torch.dtype = torch.float32) -> RotaryTables:
    cos, sin = rope_table(plain_frequencies(rope, 100.0), 1.1, MAX_POSITIONS, dtype=dtype, device=WHERE)
    return RotaryTables(cos, sin, interleave)


def positions_of(count: int) -> Tensor:
    return torch.randint(MAX_POSITIONS, (count,), device=WHERE)


class Latents(NamedTuple):
    """What prepare_latents takes; cache and tail hold NaN, and the tail is a part of a longer one."""

    summands: Tensor
    q_norm: Tensor | None
    kv_norm: Tensor
    rotary: RotaryTables
    positions: Tensor
    cache: Tensor
    whole_tail: Tensor

    def run(self, op, slots: Tensor | None, valid: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        """The query's input, the cache and the whole tail after it; the entries go to nodes 1, 2, 3."""
        cache, tail = self.cache.clone(), self.whole_tail.clone()
        given = (self.q_norm, self.kv_norm, EPS, self.rotary, self.positions)
        q_in = op(self.summands, *given, slots, valid, cache, tail[:, 1:4])
        return q_in, cache, tail


def latents_of(sizes: Sizes, parts: int, interleave: bool) -> Latents:
    """Two rows of three nodes."""
    width = sizes.kv_lora + sizes.rope
    wide = poison_(torch.empty(parts, 7, sizes.q_lora + width + 3, device=WHERE))
    wide[:, :6, :-3] = torch.randn(parts, 6, sizes.q_lora + width, device=WHERE)
    return Latents(
        wide[:, :6, :-3],
        bf16(sizes.q_lora) if sizes.q_lora else None,
        bf16(sizes.kv_lora),
        tables(sizes.rope, interleave),
        positions_of(6),
        poison_(torch.empty(4, PAGE, width, dtype=torch.bfloat16, device=WHERE)),
        poison_(torch.empty(2, 5, width, dtype=torch.bfloat16, device=WHERE)),
    )


def assert_same_entries(actual: Tensor, expected: Tensor, what: str) -> None:
    """Within rounding where something was written, and untouched elsewhere."""
    assert_close(actual.isnan(), expected.isnan(), "bitwise", what=what)
    assert_close(actual, expected, "bf16-op", what=what)


@pytest.mark.parametrize("sizes", ALL)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(("parts", "where"), [(1, "nowhere"), (3, "everywhere"), (14, "valid")])
def test_prepare_latents_equals_its_twin(sizes: Sizes, interleave: bool, parts: int, where: str) -> None:
    """Nodes that are not valid, NaN throughout, go to the tail and never to the cache."""
    given = latents_of(sizes, parts, interleave)
    slots = valid = None
    if where != "nowhere":
        slots = torch.randperm(4 * PAGE, device=WHERE)[:6]
    if where == "valid":
        valid = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool, device=WHERE)
        given.summands[:, ~valid] = torch.nan
        slots = torch.where(valid, slots, 2_147_480_000)
    actual, expected = (given.run(op, slots, valid) for op in (mla.prepare_latents, ref.prepare_latents))
    if expected[0] is None:
        assert actual[0] is None
    else:
        assert_close(actual[0], expected[0], "bf16-op", what="q_in")
    assert_same_entries(actual[1], expected[1], "cache")
    assert_same_entries(actual[2], expected[2], "tail")
    if slots is not None:
        kept = torch.ones_like(slots, dtype=torch.bool) if valid is None else valid
        entries = actual[2][:, 1:4].flatten(0, 1)
        assert_close(actual[1].flatten(0, 1)[slots[kept]], entries[kept], "bitwise", what="cache = tail")


def queries_of(sizes: Sizes, parts: int, count: int) -> tuple[Tensor, Tensor]:
    """Summands and w_uk, a strided part of kv_b; NaN behind the tokens and in the values' half."""
    width = sizes.heads * (sizes.nope + sizes.rope)
    summands = poison_(torch.empty(parts, count + 1, width, device=WHERE))[:, :count]
    summands.copy_(torch.randn(parts, count, width, device=WHERE))
    kv_b = poison_(
        torch.empty(sizes.heads, sizes.nope + 5, sizes.kv_lora, dtype=torch.bfloat16, device=WHERE)
    )
    kv_b[:, : sizes.nope] = bf16(sizes.heads, sizes.nope, sizes.kv_lora)
    return summands, kv_b[:, : sizes.nope]


@pytest.mark.parametrize("sizes", ALL)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(("parts", "count"), [(1, 1), (4, 3), (8, 17)])
def test_absorb_queries_equals_its_twin(sizes: Sizes, interleave: bool, parts: int, count: int) -> None:
    summands, w_uk = queries_of(sizes, parts, count)
    rotary, positions = tables(sizes.rope, interleave), positions_of(count)
    actual = mla.absorb_queries(summands, w_uk, rotary, positions)
    expected = ref.absorb_queries(summands, w_uk, rotary, positions)
    for part, what in ((slice(0, sizes.kv_lora), "absorbed"), (slice(sizes.kv_lora, None), "rotated")):
        assert_close(actual[..., part], expected[..., part], "bf16-op", what=what)


def test_absorbed_queries_do_not_depend_on_their_neighbours() -> None:
    """A token's bits are the same alone and as one of 18, between tokens of NaN."""
    summands, w_uk = queries_of(SMALL, 3, 18)
    rotary, positions = tables(SMALL.rope, True), positions_of(18)
    alone = mla.absorb_queries(summands[:, 16:17], w_uk, rotary, positions[16:17])
    summands[:, 15] = torch.nan
    summands[:, 17] = torch.nan
    together = mla.absorb_queries(summands, w_uk, rotary, positions)
    assert_close(together[16:17], alone, "bitwise")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("sizes", ALL)
def test_twins_give_the_bits_of_separate_steps(sizes: Sizes, interleave: bool, dtype: torch.dtype) -> None:
    """One summand in a wide type: the key turns as one more head of the query, norms and product apart."""
    q_lora, kv_lora, rope, nope, heads = sizes
    width = kv_lora + rope
    rotary = tables(rope, interleave, dtype)
    positions = positions_of(6)
    down, q = (torch.randn(6, n, dtype=dtype, device=WHERE) for n in (q_lora + width, heads * (nope + rope)))
    norms = [torch.randn(n, dtype=dtype, device=WHERE) for n in (q_lora, kv_lora)]
    w_uk = torch.randn(heads, nope + 3, kv_lora, dtype=dtype, device=WHERE)[:, :nope]
    cache, tail = (torch.zeros(*shape, width, dtype=dtype, device=WHERE) for shape in ((3, PAGE), (2, 3)))
    slots = torch.arange(6, device=WHERE) + 3
    rest = (norms[1], EPS, rotary, positions, slots, None, cache, tail)
    q_in = ref.prepare_latents(down[None], norms[0] if q_lora else None, *rest)
    absorbed = ref.absorb_queries(q[None], w_uk, rotary, positions)

    per_head = q.view(6, heads, nope + rope)
    rows = rope_rows(rotary.cos, rotary.sin, positions, interleave=interleave)
    turning = torch.cat((per_head[..., nope:], down[:, None, q_lora + kv_lora :]), 1)
    turned = apply_rope(turning, *rows, interleave=interleave)
    latent = F.rms_norm(down[:, q_lora : q_lora + kv_lora], (kv_lora,), norms[1], EPS)
    entries = torch.cat((latent, turned[:, -1]), -1)
    product = torch.bmm(per_head[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    if q_in is not None:
        assert_close(q_in, F.rms_norm(down[:, :q_lora], (q_lora,), norms[0], EPS), "bitwise", what="q_in")
    assert_close(tail.flatten(0, 1), entries, "bitwise", what="tail")
    assert_close(cache.flatten(0, 1)[3:9], entries, "bitwise", what="cache")
    assert_close(absorbed, torch.cat((product, turned[:, :-1]), -1), "bitwise", what="queries")


def test_no_tokens_launch_nothing() -> None:
    given = latents_of(SMALL, 2, True)
    empty = given.whole_tail[:0]
    none = torch.empty(0, dtype=torch.int64, device=WHERE)
    rest = (given.kv_norm, EPS, given.rotary, none, None, None, given.cache, empty)
    q_in = mla.prepare_latents(given.summands[:, :0], given.q_norm, *rest)
    assert q_in is not None
    assert q_in.shape == (0, SMALL.q_lora)
    summands, w_uk = queries_of(SMALL, 1, 0)
    assert mla.absorb_queries(summands, w_uk, given.rotary, none).shape == (0, 2, 20)


def test_kernels_refuse_what_they_would_misread() -> None:
    given = latents_of(SMALL, 2, True)
    with pytest.raises(AssertionError, match="columns are not"):
        given._replace(kv_norm=bf16(SMALL.kv_lora + 1)).run(mla.prepare_latents, None, None)
    with pytest.raises(AssertionError, match="pages must follow"):
        given._replace(cache=given.cache.transpose(0, 1)).run(mla.prepare_latents, None, None)
    with pytest.raises(AssertionError, match="must be bfloat16"):
        given._replace(cache=given.cache.float()).run(mla.prepare_latents, None, None)
    with pytest.raises(AssertionError, match="positions must be int64"):
        given._replace(positions=given.positions.int()).run(mla.prepare_latents, None, None)
    with pytest.raises(AssertionError, match="does not hold 6 nodes"):
        given._replace(whole_tail=given.whole_tail[:1]).run(mla.prepare_latents, None, None)
    summands, w_uk = queries_of(SMALL, 1, 2)
    doubled = tables(SMALL.rope, True, torch.float64)
    with pytest.raises(AssertionError, match="tables must be float32"):
        mla.absorb_queries(summands, w_uk, doubled, positions_of(2))
    with pytest.raises(AssertionError, match="columns are not 2 heads"):
        mla.absorb_queries(summands[..., 1:], w_uk, given.rotary, positions_of(2))
