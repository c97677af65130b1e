"""The offline interface tells all that the engine does about how a completion ended."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from nextn import LLM, SamplingParams
from nextn.models.deepseek import DeepseekModel


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", num_pages=16, max_model_len=256, max_running_requests=2)


def test_a_completion_names_what_stopped_it(llm: LLM) -> None:
    """A stop string or a stop token; nothing where the limit did."""
    text = llm.generate("def fibonacci(n):\n", SamplingParams(max_tokens=12, temperature=0))[0]
    assert (text.finish_reason, text.stop_reason, text.error) == ("length", None, None)
    stop = text.text[3:6]
    params = [
        SamplingParams(max_tokens=12, temperature=0, stop=(stop,)),
        SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(text.token_ids[4],)),
    ]
    ended = llm.generate(["def fibonacci(n):\n"] * 2, params)
    assert [each.finish_reason for each in ended] == ["stop", "stop"]
    assert [each.stop_reason for each in ended] == [stop, text.token_ids[4]]


def test_a_completion_that_fails_says_why(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits without a number: the answer is an error with its sentence, not an empty text."""
    logits = DeepseekModel.logits

    def damaged(model: DeepseekModel, h_normed: Tensor) -> Tensor:
        return logits(model, h_normed).fill_(math.nan)

    monkeypatch.setattr(DeepseekModel, "logits", damaged)
    failed = llm.generate("def fibonacci(n):\n", SamplingParams(max_tokens=4))[0]
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "no finite logit" in failed.error
