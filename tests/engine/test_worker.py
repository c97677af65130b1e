"""What a GPU cannot run is refused at the start with a sentence, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nextn.config import ModelConfig
from nextn.engine.worker import check_kernels, choose_device
from nextn.errors import ConfigError
from tests.tiny import TINY

CFG = ModelConfig.from_dict(TINY)
GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The capability that the (absent) GPU claims; tests change it."""
    claimed = [(9, 0)]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: claimed[0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A800")
    return claimed


def test_an_older_gpu_is_refused_in_bfloat16_only(capability: list[tuple[int, int]]) -> None:
    """sm_80 lacks what the kernels are built from; float32 on plain torch remains."""
    check_kernels(CFG, GPU, torch.bfloat16)
    capability[0] = (8, 0)
    with pytest.raises(ConfigError, match=r"A800 has compute capability 8.0; .* --dtype float32"):
        check_kernels(CFG, GPU, torch.bfloat16)
    check_kernels(CFG, GPU, torch.float32)
    check_kernels(CFG, torch.device("cpu"), torch.bfloat16)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_routed_experts": 2048}, "at most 1024 routed experts"),
        ({"kv_lora_rank": 768}, "latents of up to 512"),
        ({"qk_rope_head_dim": 128}, "rotated keys of up to 64"),
        ({"weight_block_size": (128, 100)}, "multiple of 16 columns"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(changes: dict[str, object], text: str) -> None:
    """The figure that would do stands in the sentence."""
    with pytest.raises(ConfigError, match=text):
        check_kernels(replace(CFG, **changes), GPU, torch.bfloat16)


def test_a_gpu_without_triton_is_told_what_to_install(
    capability: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an import error in the middle of the first step."""
    assert capability == [(9, 0)]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(ConfigError, match="needs Triton"):
            check_kernels(CFG, GPU, dtype)


def test_a_second_gpu_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launch on a process's current device, which is the first that it sees."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3 and --device cuda"):
        choose_device("cuda:3")
