"""The engine on its kernels from end to end, in Triton's interpreter, on a tiny bf16 model."""

from __future__ import annotations

import pytest
import torch

from nextn.config import SpecConfig
from nextn.kernels import ops
from tests.tiny import prompt_of, run, tiny_engine, tiny_models
from tests.tiny import request as make_request

SHAPES = (None, SpecConfig(2, 4, 4), SpecConfig(3, 1, 4), SpecConfig(3, 3, 6))


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op that has a kernel runs it, on CPU tensors."""
    monkeypatch.setattr(ops, "on_gpu", lambda _: True)


def _texts(spec: SpecConfig | None, temperature: float) -> dict[str, list[int]]:
    """Two requests of different lengths in small pages, prefilled in chunks."""
    models = tiny_models(dtype=torch.bfloat16)
    engine = tiny_engine(models, spec=spec, page_size=4, num_pages=60, chunked_prefill_size=7)
    requests = [
        make_request(str(i), prompt_of(4 + 7 * i, i), max_tokens=5, temperature=temperature, seed=i)
        for i in range(2)
    ]
    return run(engine, requests)


@pytest.mark.parametrize("spec", SHAPES, ids=str)
def test_kernels_bring_the_tokens_of_their_twins(
    spec: SpecConfig | None, request: pytest.FixtureRequest
) -> None:
    """Prefill, drafting, verification, acceptance and commit; no cache entry that is unwritten is read."""
    expected = _texts(spec, 0.0)
    request.getfixturevalue("on_kernels")
    assert _texts(spec, 0.0) == expected


@pytest.mark.usefixtures("on_kernels")
def test_sampling_on_kernels_gives_the_same_tokens_with_and_without_a_tree() -> None:
    """The noise of a position is the same whichever kernel and level asks for it."""
    assert _texts(SpecConfig(2, 4, 4), 0.8) == _texts(None, 0.8)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.7, "frequency_penalty": 0.5}],
    ids=["filters", "penalties"],
)
def test_float64_on_a_gpu_mixes_kernels_and_plain_torch_exactly(
    params: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """Layers run plain torch, trees and noise run kernels: the CPU's tokens, with a tree and without."""

    def texts(spec: SpecConfig | None) -> dict[str, list[int]]:
        engine = tiny_engine(spec=spec, page_size=4, num_pages=60)
        requests = [make_request(str(i), prompt_of(5, i), max_tokens=6, seed=i, **params) for i in range(2)]
        return run(engine, requests)

    expected = texts(None)
    request.getfixturevalue("on_kernels")
    assert texts(SpecConfig(2, 4, 4)) == expected
