"""The server over the real engine, on a tiny random checkpoint with a tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nextn.config import EngineConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.models.random_checkpoint import write_random_checkpoint
from tests.server.byte_bpe import write_tokenizer
from tests.server.fake import running_server, wait_until

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.7, "seed": -3, "stop": ["e", "t"]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_tokenizer(folder / "tokenizer")
    write_random_checkpoint(CONFIG, folder / "model", stored_as="fp32", tokenizer=tokenizer)
    return folder / "model"


def _engine(checkpoint: Path, spec: SpecConfig | None) -> Engine:
    config = EngineConfig(
        device="cpu", dtype="float64", spec=spec, max_running_requests=4, num_pages=32, page_size=16
    )
    return Engine.from_config(checkpoint, config)


def _ask(url: str, *, stream: bool) -> list[str]:
    texts = []
    for parameters in PARAMETERS:
        body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 24, **parameters}
        answer = httpx.post(url + "/v1/chat/completions", json=body | {"stream": stream}, timeout=60)
        assert answer.status_code == 200
        if stream:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            chunks = [json.loads(line) for line in lines]
            texts.append("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
        else:
            texts.append(answer.json()["choices"][0]["message"]["content"])
    return texts


def test_the_text_is_the_same_with_and_without_drafts_and_streams(checkpoint: Path) -> None:
    with running_server(_engine(checkpoint, SpecConfig(2, 4, 4))) as running:
        drafted = _ask(running.url, stream=False)
        assert _ask(running.url, stream=True) == drafted
    with running_server(_engine(checkpoint, None)) as running:
        assert _ask(running.url, stream=False) == drafted
    assert len(set(drafted)) == len(PARAMETERS)


def test_usage_tells_what_speculation_did(checkpoint: Path) -> None:
    with running_server(_engine(checkpoint, SpecConfig(2, 4, 4))) as running:
        body = {"prompt": "The quick", "max_tokens": 20, "ignore_eos": True, "include_speculation": True}
        usage = httpx.post(running.url + "/v1/completions", json=body, timeout=60).json()["usage"]
    told = usage["speculation"]
    assert usage["completion_tokens"] == 20
    assert told["drafted_tokens"] == 3 * told["cycles"]
    # The first token comes from the prompt; a last cycle may bring more than was asked for.
    assert 19 <= told["cycles"] + told["accepted_tokens"] <= 21
    assert sum(told["accepted_by_position"]) == told["accepted_tokens"]
    assert told["acceptance_length"] == pytest.approx(1 + told["accepted_tokens"] / told["cycles"], abs=1e-3)


def test_a_client_that_leaves_gives_its_pages_back(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(checkpoint, SpecConfig(2, 4, 4))
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())  # so that it is not done first
    with running_server(engine) as running:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client:
            stream = client.completions.create(
                model="fake", prompt="Hi", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            with stream:
                next(iter(stream))
        wait_until(lambda: not engine.has_work())
        assert engine.stats()["aborted"] == 1
        assert engine.stats()["pages_used"] == 0


def test_a_prompt_is_found_again_but_not_under_another_salt(checkpoint: Path) -> None:
    """In usage and metrics alike; at idle every page is free or kept."""
    engine = _engine(checkpoint, SpecConfig(2, 4, 4))
    prompt = list(range(5, 105))
    with running_server(engine) as running:

        def cached(**more: Any) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
            usage = httpx.post(running.url + "/v1/completions", json=body, timeout=60).json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        salts: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
        assert [cached(**salt) for salt in salts] == [0, 0, 0]
        assert [cached(**salt) for salt in salts] == [96, 96, 96]
        assert cached(prompt=[*prompt[:40], 3, *prompt[41:]]) == 32
        wait_until(lambda: not engine.has_work())
        metrics = httpx.get(running.url + "/metrics").text.splitlines()
        assert "nextn_prefix_cache_queries_total 700.0" in metrics
        assert "nextn_prefix_cache_hits_total 320.0" in metrics
        told = httpx.get(running.url + "/debug/integrity").json()
        assert told["pages_used"] == 0 < told["pages_cached"]
        assert told["pages_cached"] + told["pages_free"] == told["pages"] == 32


def test_several_answers_to_a_prompt_compute_it_once(checkpoint: Path) -> None:
    with running_server(_engine(checkpoint, SpecConfig(2, 4, 4))) as running:
        body = {"prompt": list(range(5, 105)), "max_tokens": 4, "n": 3, "seed": 1}
        assert httpx.post(running.url + "/v1/completions", json=body, timeout=60).status_code == 200
        metrics = httpx.get(running.url + "/metrics").text.splitlines()
    assert "nextn_prefix_cache_hits_total 192.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_goes_beyond_its_limits_is_the_client_s_fault(checkpoint: Path, stream: bool) -> None:
    """Found when it is compiled, or behind the first tokens, in a stream that has begun: named in both."""
    many = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1500)}}
    body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "guided_json": many, "stream": stream}
    engine = _engine(checkpoint, SpecConfig(2, 4, 4))
    with running_server(engine) as running:
        answer = httpx.post(running.url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400 or (stream and answer.status_code == 200), answer.text
        events = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        error = json.loads(events[-1] if answer.status_code == 200 else answer.text)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "guided_json")
        assert "grammar" in error["message"]
        wait_until(lambda: not engine.has_work())
        engine.check_integrity()
