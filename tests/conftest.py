"""What every test runs under: one thread, a seed of its own, poisoned memory, a repaired interpreter.

Where CUDA is absent the interpreter has to be chosen before anything imports triton, so it is chosen here.
"""

from __future__ import annotations

import importlib.util
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
POISONED = frozenset({"e2e", "engine", "gpu", "kernels", "models", "tree"})
"""Folders whose tests get NaN from torch.empty; elsewhere other libraries allocate for themselves."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads warn after a fork
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks a hub for files must fail
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from tests import triton_interp

        triton_interp.install()

# A GPU machine may hold the engine alone: without the server's packages its tests are left out, and said so.
MISSING = [
    name
    for name in ("fastapi", "uvicorn", "openai", "prometheus_client")
    if importlib.util.find_spec(name) is None
]
collect_ignore = ["server", "bench/test_server_overhead.py", "test_flags.py"] if MISSING else []

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "nextn", deadline=None, derandomize=True, database=None, print_blob=True, max_examples=50
)
hypothesis.settings.load_profile("nextn")


class TorchRandom:
    """Torch's generator as Hypothesis wants one: it seeds it before each example, so that examples replay."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps a weak reference only
hypothesis.register_random(TORCH_RANDOM)


def pytest_report_header() -> str | None:
    """Name what is left out before the first test runs."""
    return f"server tests are left out: {', '.join(MISSING)} not installed" if MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU (Triton's interpreter)."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seed every generator from the test's id: each case has data of its own, the same in every run."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN, or with an absurd integer, so that reading it before writing shows."""
    folder = Path(str(request.node.path)).parent.name
    if folder in POISONED:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
        ):
            monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return poison_(allocate(*args, **kwargs))

    return poisoned


def poison_(tensor: Tensor) -> Tensor:
    """Overwrite `tensor` in place with what no computation should read; returns it."""
    if tensor.device.type == "meta" or tensor.dtype == torch.bool:
        return tensor
    with torch.no_grad():
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in both formats
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(min(torch.iinfo(tensor.dtype).max, 2_147_480_000))
    return tensor
