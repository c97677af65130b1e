"""The kernel between logits and choice at real sizes, and a whole decode step with every option on."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from nextn.config import SpecConfig
from nextn.engine.request import Request
from nextn.engine.step import pack, plain_step, spec_step
from nextn.kernels import ops
from nextn.kernels.ref import sampling as ref
from tests.kernels.test_adjust import ROWS, check
from tests.strategies import sampling_batch
from tests.tiny import drain, prompt_of, request, tiny_engine, tiny_models

pytestmark = pytest.mark.gpu
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.3, "logprobs": 5,
    "repetition_penalty": 1.2, "logit_bias": ((3, 2.0), (9, -100.0)), "min_tokens": 6,
    "stop_token_ids": (4, 5), "prompt_logprobs": 2,
}  # fmt: skip


def _on_device(batch: ref.SamplingBatch) -> ref.SamplingBatch:
    names = [name for name in batch.__slots__ if isinstance(getattr(batch, name), torch.Tensor)]
    return replace(batch, **{name: getattr(batch, name).cuda() for name in names})


@pytest.mark.parametrize("levels", [50, 10**7])
@pytest.mark.parametrize("vocab", [2000, 16160, 129280])
def test_a_real_vocabulary_with_every_option(vocab: int, levels: int) -> None:
    """Every row's support and values are the twin's, with few different logits too."""
    rows = len(ROWS)
    logits = (torch.randint(0, levels, (rows, 4, vocab)) * (12.0 / levels)).cuda()
    counts, seen = torch.randint(0, 2, (rows, vocab)).int(), torch.rand(rows, vocab) < 0.1
    words = torch.randint(-(2**31), 2**31, (rows, 4, -(-vocab // 32))).int()
    path = torch.randint(0, vocab, (rows, 4, 3), device="cuda")
    for grammar in (None, words):
        batch = _on_device(sampling_batch(ROWS, vocab, counts, seen, grammar))
        check(logits, batch, (path, path >= 2), torch.full((rows, 4), 5, device="cuda"))


def test_log_probabilities_are_the_twin_s() -> None:
    """Ids by the kernel that finds children, values by the same formulas."""
    batch = _on_device(replace(sampling_batch(ROWS, 16160), raw_logprobs=torch.arange(len(ROWS)) % 2 == 0))
    logits, tokens = 3 * torch.randn(len(ROWS), 4, 16160).cuda(), torch.zeros(len(ROWS), 4).long().cuda()
    path = torch.zeros(len(ROWS), 4, 0).long().cuda()
    after = ((path, path.bool()), tokens)
    values, ids = ops.chosen_logprobs(logits, ops.adjust_logits(logits, batch, *after)[0], batch, tokens)
    adjusted = ref.adjust_logits(logits, batch, *after[0], after[1])
    expected, expected_ids = ref.chosen_logprobs(logits, adjusted, batch, tokens)
    finite = expected > -torch.inf
    assert torch.equal(values > -torch.inf, finite)
    assert (values[finite] - expected[finite]).abs().max() < 1e-4
    assert (ids != expected_ids)[finite].float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_speculation_changes_nothing_with_every_option_on(dtype: torch.dtype) -> None:
    """Tokens of plain decoding, in float64 (plain torch adjusts) and in float32 (the kernel does)."""
    models = tiny_models(dtype=dtype, device_name="cuda")
    answers = []
    for spec in (None, SpecConfig(3, 4, 8)):
        engine = tiny_engine(models, spec=spec)
        for row in range(4):
            each = request(str(row), prompt_of(9, row), max_tokens=30, seed=row, **EVERYTHING)
            engine.add(Request(each.request_id, each.prompt_tokens, each.params))
        found: dict[str, list[Any]] = {str(row): [] for row in range(4)}
        for output in drain(engine):
            found[output.request_id] += zip(output.token_ids, output.logprobs, strict=True)
        answers.append(found)
    plain, speculated = answers
    for name, expected in plain.items():
        assert [token for token, _ in speculated[name]] == [token for token, _ in expected]
        for (_, got), (_, want) in zip(speculated[name], expected, strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=1e-3)


def test_a_step_with_every_option_asks_the_host_nothing() -> None:
    """Drafting, verifying, accepting and committing launch without a synchronisation, as graphs need."""
    models = tiny_models(dtype=torch.float32, device_name="cuda")
    spec = SpecConfig(3, 2, 5)
    engine = tiny_engine(models, spec=spec)
    for row in range(3):
        engine.add(request(str(row), prompt_of(9, row), max_tokens=60, seed=row, **EVERYTHING))
    for _ in range(2):
        engine.step()
    worker = engine.worker
    batch = worker._batch(engine.scheduler.running)
    assert batch.any_bias
    assert batch.any_logprobs
    with torch.inference_mode():
        spec_step(worker.models, worker.state, batch, spec, worker.options)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            packed = pack(spec_step(worker.models, worker.state, batch, spec, worker.options))
            plain_step(worker.models, worker.state, batch, worker.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert packed.shape == (3, 1 + spec.width * 22)
