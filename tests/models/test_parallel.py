"""Tensor parallelism: two ranks give what one gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from nextn.errors import ConfigError
from nextn.kernels.comm import SINGLE, TensorParallel
from tests.compare import assert_close
from tests.models import tp_rank
from tests.models.build import build, small_dict


def test_two_ranks_have_the_logits_of_one(tmp_path: Path) -> None:
    """Prefill, tree decode and draft logits of both ranks equal a single rank's, also from FP8 shards."""
    mp.spawn(tp_rank.main, args=(str(tmp_path),), nprocs=2)
    expected = tp_rank.single()
    for rank in range(2):
        actual = torch.load(tmp_path / f"{rank}.pt")
        assert actual.keys() == expected.keys()
        for name, logits in expected.items():
            assert_close(actual[name], logits, "fp64", what=f"rank {rank} {name}")


def test_shards_cover_everything_once() -> None:
    """Shards follow each other in the order of ranks."""
    assert [TensorParallel(rank, 4).shard(12, "rows") for rank in range(4)] == [
        slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12),
    ]  # fmt: skip
    assert SINGLE.shard(7, "rows") == slice(0, 7)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_attention_heads": 3}, "3 attention heads"),
        ({"vocab_size": 97}, "97 vocabulary rows"),
        ({"moe_intermediate_size": 33}, "33 expert intermediate columns"),
    ],
)
def test_what_cannot_be_shared_equally_is_refused(changes: dict[str, int], what: str) -> None:
    """An odd number of heads, tokens or columns for two ranks is a `ConfigError` that names it."""
    with pytest.raises(ConfigError, match=what):
        build(small_dict(**changes), tp=TensorParallel(0, 2))
