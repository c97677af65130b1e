"""Loading onto a GPU: through pinned slots, by several readers, the same bytes as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nextn.kernels.comm import TensorParallel
from nextn.models import reader
from nextn.models.loader import load_checkpoint
from nextn.models.random_checkpoint import write_random_checkpoint
from tests.compare import assert_close
from tests.models.checkpoints import capturing, small_config, specs_of

pytestmark = pytest.mark.gpu

COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint of some 100 MB: matrices of several slots and hundreds of small ones."""
    path = tmp_path_factory.mktemp("checkpoints") / "wide"
    config = small_config(hidden_size=2048, vocab_size=8192, n_routed_experts=64, n_group=8, topk_group=4)
    write_random_checkpoint(config, path, shard_size=30_000_000)
    return path


@pytest.mark.parametrize("slot", [1 << 20, 1 << 24])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_gets_the_bytes_that_a_cpu_gets(
    wide: Path, monkeypatch: pytest.MonkeyPatch, slot: int, rank: int, ranks: int
) -> None:
    """Weights and scales of a rank, whole and cut by columns, with slots that are used again at once."""
    if rank >= ranks:
        pytest.skip("one rank is rank 0")
    monkeypatch.setattr(reader, "SLOT_BYTES", slot)
    config = small_config(hidden_size=2048, vocab_size=8192, n_routed_experts=64, n_group=8, topk_group=4)
    specs = specs_of(config, tp=TensorParallel(rank, ranks))
    loaded = []
    for device in ("cpu", "cuda"):
        capture, got = capturing(specs)
        load_checkpoint(
            wide,
            capture,
            skip=lambda name: name in COPIES,
            device=torch.device(device),
            progress=False,
            threads=8,
        )
        loaded.append(got)
    for name, (weight, scale) in loaded[0].items():
        other, other_scale = loaded[1][name]
        assert other.is_cuda
        assert_close(other, weight, "bitwise", what=name)
        assert (scale is None) == (other_scale is None)
        if scale is not None and other_scale is not None:
            assert_close(other_scale, scale, "bitwise", what=name)


def test_a_load_leaves_no_memory_behind(wide: Path) -> None:
    """What lay on its way to the modules is given back, so that the cache can have it."""
    config = small_config(hidden_size=2048, vocab_size=8192, n_routed_experts=64, n_group=8, topk_group=4)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    specs, got = capturing(specs_of(config))
    load_checkpoint(
        wide, specs, skip=lambda name: name in COPIES, device=torch.device("cuda"), progress=False
    )
    held = sum(t.nbytes for pair in got.values() for t in pair if t is not None)
    assert held > 50_000_000
    got.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
