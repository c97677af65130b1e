"""Tree attention over pages: what each node sees, how work is cut, and what must never reach a result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn.kernels import attention
from nextn.kernels.ref import attention as ref
from tests.compare import assert_close
from tests.conftest import HAS_CUDA

WHERE = torch.device("cuda" if HAS_CUDA else "cpu")
SCALE = 0.2


@dataclass
class Case:
    """Arguments of decode_attention; everything no node may read is NaN."""

    q: Tensor
    cache: Tensor
    page_table: Tensor
    prefix_lens: Tensor
    tail: Tensor
    mask: Tensor
    w_uv: Tensor

    def run(self, config: attention.AttentionConfig | None = None) -> Tensor:
        block, page_size = None if config is None else config.block_kv, self.cache.shape[1]
        sizes = {"page_size": page_size, "block_kv": block}
        plan = attention.plan_attention(self.prefix_lens, self.tail.shape[1], **sizes)
        return attention.decode_attention(*self.args(), plan=plan, config=config)

    def expected(self) -> Tensor:
        """In float32 from the same bf16 inputs, rounded once."""
        wide = [value.float() if value.is_floating_point() else value for value in self.tensors()]
        out = ref.decode_attention(*wide[:6], SCALE, wide[6])
        return out.to(torch.bfloat16)

    def tensors(self) -> tuple[Tensor, ...]:
        inputs = (self.q, self.cache, self.page_table, self.prefix_lens, self.tail, self.mask, self.w_uv)
        return inputs

    def args(self) -> tuple[object, ...]:
        *inputs, w_uv = self.tensors()
        return (*inputs, SCALE, w_uv)


def make_case(
    prefix: list[int],
    nodes: int = 2,
    heads: int = 4,
    *,
    page_size: int = 7,
    tail_len: int | None = None,
    kv_lora: int = 16,
    rope: int = 4,
    value_dim: int = 8,
) -> Case:
    """Random inputs; node n sees tail entry tail_len - nodes + n, its own, and some of those before."""
    rows, width = len(prefix), kv_lora + rope
    tail_len = nodes if tail_len is None else tail_len

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=WHERE).bfloat16()

    lens = torch.tensor(prefix, device=WHERE)
    table_width = max(1, -(-max(prefix) // page_size)) + 1  # a spare column that no row uses
    pages = rows * table_width + 1
    table = 1 + torch.randperm(rows * table_width, device=WHERE).view(rows, table_width)
    cache = torch.full((pages, page_size, width), float("nan"), device=WHERE).bfloat16()
    for row, length in enumerate(prefix):
        position = torch.arange(length, device=WHERE)
        cache[table[row, position // page_size], position % page_size] = random(length, width)
    used = torch.arange(table_width, device=WHERE) < (-(-lens // page_size))[:, None]
    table = torch.where(used, table, 0)  # page 0 is nobody's
    tail = torch.full((rows, tail_len + 1, width), float("nan"), device=WHERE).bfloat16()
    tail[:, :tail_len] = random(rows, tail_len, width)
    own = torch.arange(tail_len - nodes, tail_len, device=WHERE)
    before = torch.randint(0, 2, (rows, nodes, tail_len), device=WHERE).bool()
    before &= torch.arange(tail_len, device=WHERE) < own[:, None]
    bits = before | (torch.arange(tail_len, device=WHERE) == own[:, None])
    mask = (bits.long() << torch.arange(tail_len, device=WHERE)).sum(-1)  # bit 63 wraps to the sign
    both = random(heads, 2 * value_dim, kv_lora)
    return Case(
        random(rows * nodes, heads, width), cache, table, lens, tail[:, :tail_len], mask, both[:, value_dim:]
    )


def config_of(case: Case, **changes: int) -> attention.AttentionConfig:
    """The default with some fields changed."""
    (rows, nodes), (heads, value_dim, _) = case.mask.shape, case.w_uv.shape
    return attention.choose_config(rows, nodes, heads, value_dim, 4)._replace(**changes)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    prefix=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    nodes=st.integers(1, 5),
    extra=st.sampled_from([0, 1, 40]),
    heads=st.sampled_from([1, 3, 16]),
    page_size=st.sampled_from([1, 7, 64, 128]),
    splits=st.integers(1, 5),
)
def test_any_cut_and_any_pages_match_the_twin(prefix, nodes, extra, heads, page_size, splits):
    case = make_case(prefix, nodes, heads, page_size=page_size, tail_len=nodes + extra)
    assert_close(case.run(config_of(case, splits=splits)), case.expected(), "bf16-attention")


@pytest.mark.parametrize("block_kv", [16, 32, 64])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_blocks_of_every_size_match_the_twin(block_kv, page_size):
    case = make_case([70, 0, 33], 3, page_size=page_size, tail_len=64)
    assert_close(case.run(config_of(case, block_kv=block_kv)), case.expected(), "bf16-attention")


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("block_kv", [16, 64])
def test_tiles_of_every_size_match_the_twin(block_rows, block_kv):
    case = make_case([200, 0, 64, 63, 65], 3, 16, page_size=64, kv_lora=32, rope=16)
    config = config_of(case, block_rows=block_rows, block_kv=block_kv, splits=3)
    assert_close(case.run(config), case.expected(), "bf16-attention")


def test_one_program_a_block_and_programs_without_work_match_the_twin():
    case = make_case([200, 1, 64])
    config = config_of(case, splits=16)
    assert_close(case.run(config), case.expected(), "bf16-attention")


def test_64_nodes_with_the_sign_bit_match_the_twin():
    case = make_case([5], 64, 2)
    assert int(case.mask.min()) < 0
    assert_close(case.run(), case.expected(), "bf16-attention")


def test_several_tiles_of_heads_match_the_twin():
    case = make_case([40, 90], 3, 48)
    assert_close(case.run(), case.expected(), "bf16-attention")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("slots", "nodes", "values"), [(1, 16, 16), (2, 32, 16), (16, 16, 32)])
def test_every_grouping_of_the_merge_matches_the_twin(slots, nodes, values, fused):
    case = make_case([90, 3, 20], 3, 4, kv_lora=48, rope=8, value_dim=20)
    config = config_of(case, fused=fused, merge_slots=slots, up_nodes=nodes, up_values=values, splits=6)
    assert_close(case.run(config), case.expected(), "bf16-attention")


def test_default_config_of_few_and_of_many_tokens_match_the_twin():
    for processors in (1, 1000):  # which decides how the merge is cut
        case = make_case([50, 20], 2, 4, kv_lora=24, value_dim=12)
        config = attention.choose_config(2, 2, 4, 12, processors)._replace(splits=3)
        assert_close(case.run(config), case.expected(), "bf16-attention")


def test_bf16_twin_is_what_the_kernel_computes():
    case = make_case([30, 9])
    assert_close(case.run(), ref.decode_attention(*case.args()), "bf16-attention")


def test_twin_takes_a_view_to_share_between_layers():
    case = make_case([30, 9])
    sizes = {"page_size": case.cache.shape[1], "tail_len": case.tail.shape[1]}
    view = ref.tree_view(case.page_table, case.prefix_lens, case.mask, dtype=torch.bfloat16, **sizes)
    assert_close(ref.decode_attention(*case.args(), plan=view), ref.decode_attention(*case.args()), "bitwise")


def test_a_nodes_nan_stays_its_own():
    case = make_case([30, 9], 2)
    clean = case.run()
    case.q[1] = float("nan")
    out = case.run()
    assert out[1].isnan().all()
    assert_close(out[[0, 2, 3]], clean[[0, 2, 3]], "bitwise")


def test_same_inputs_give_the_same_bits():
    case = make_case([130, 64, 0], 3)
    assert_close(case.run(), case.run(), "bitwise")


def test_large_scores_do_not_overflow():
    case = make_case([130], 2)
    case.q *= 100
    assert_close(case.run(), case.expected(), "bf16-attention")


def test_plan_counts_prefix_and_tail_blocks():
    lens = torch.tensor([0, 1, 64, 65, 200], device=WHERE)
    plan = attention.plan_attention(lens, 4)
    assert plan.bounds.tolist() == [0, 1, 3, 5, 8, 13]
    assert attention.plan_attention(lens, 40, block_kv=32).bounds.tolist() == [0, 2, 5, 9, 14, 23]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 20, dtype=torch.bfloat16)}, "are not 2 rows of 2 nodes"),
        ({"q": torch.zeros(4, 4, 20)}, "must be bf16"),
        ({"mask": torch.ones(2, 2, dtype=torch.int32)}, "must be int64"),
        ({"w_uv": torch.zeros(3, 8, 16, dtype=torch.bfloat16)}, "w_uv must be"),
        ({"tail": torch.zeros(2, 3, 20, dtype=torch.bfloat16)}, "plan's tail has 2 entries, not 3"),
    ],
)
def test_unsupported_inputs_are_refused_with_a_sentence(change, message):
    case = make_case([5, 6])
    plan = attention.plan_attention(case.prefix_lens, 2)
    for name, value in change.items():
        setattr(case, name, value.to(WHERE))
    with pytest.raises(AssertionError, match=message):
        attention.decode_attention(*case.args(), plan=plan)


def test_a_scale_that_would_turn_maxima_into_minima_is_refused():
    case = make_case([5, 6])
    plan = attention.plan_attention(case.prefix_lens, 2)
    *before, scale, w_uv = case.args()
    with pytest.raises(AssertionError, match="scale must be positive"):
        attention.decode_attention(*before, -scale, w_uv, plan=plan)


def test_the_kernel_by_roles_runs_only_where_it_is_known_to_work(monkeypatch):
    """On Hopper, with its own Triton, tiles and blocks of 64, and entries that TMA can read."""
    config = attention.choose_config(2, 4, 16, 128, 132)
    cache, tail = torch.zeros(4, 64, 576, dtype=torch.bfloat16), torch.zeros(2, 4, 576, dtype=torch.bfloat16)

    def by_roles(config=config, cache=cache, tail=tail, kv_lora=512):
        return attention._by_roles(config, cache, tail, kv_lora)

    assert not by_roles()
    monkeypatch.setattr(attention, "is_hopper", lambda: True)
    monkeypatch.setattr(attention.triton, "__version__", attention.ROLES_TRITON + "0")
    assert by_roles()
    assert by_roles(tail=torch.zeros(2, 9, 576, dtype=torch.bfloat16)[:, 3:7])
    assert not by_roles(config._replace(roles=False))
    assert not by_roles(config._replace(block_kv=32))
    assert not by_roles(cache=torch.zeros(4, 48, 576, dtype=torch.bfloat16))
    assert not by_roles(kv_lora=384)
    monkeypatch.setattr(attention.triton, "__version__", "3.9.0")
    assert not by_roles()
