"""Kinds of fault that users of other engines reported and that no other test here would notice.

Each was checked by breaking a copy of the engine in that way: the test failed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nextn import LLM, SamplingParams
from nextn.config import EngineConfig, SpecConfig
from nextn.engine import memory
from nextn.engine.engine import Engine
from nextn.engine.scheduler import Running
from nextn.engine.state import StepBatch
from nextn.engine.step import Place, draft
from nextn.errors import ConfigError
from nextn.kernels.ref.sampling import level_noise, process_logits
from nextn.models.inputs import PrefillInput
from tests.compare import assert_close
from tests.tiny import TINY, drain, prompt_of, request, run, tiny_engine, tiny_models

SPEC = SpecConfig(3, 4, 8)


def _plain(prompt: list[int], **params: Any) -> list[int]:
    return run(tiny_engine(spec=None, max_running_requests=1), [request("p", prompt, **params)])["p"]


def _batch(*entries: Running) -> StepBatch:
    """A decode step over `entries`, all of which have the same parameters."""
    params = entries[0].request.params
    rows = torch.tensor([entry.row for entry in entries])
    return StepBatch(
        rows,
        torch.ones_like(rows, dtype=torch.bool),
        pages=20,
        any_sampled=params.temperature > 0,
        any_penalty=params.needs_penalties,
    )


def _chain_value(engine: Engine, entry: Running, path: list[int]) -> torch.Tensor:
    """Value of `path` after the row's tokens, by fresh NextN prefills over that path alone."""
    models, state = engine.worker.models, engine.worker.state
    sampling = state.sampling_batch(_batch(entry))
    noise = level_noise(sampling, state.n[entry.row : entry.row + 1] + 1, len(path), 40, torch.float64)
    assert models.nextn is not None
    tokens = entry.request.prompt_tokens + entry.request.output_tokens
    states = models.target.final_norm(models.target.prefill(*_fresh(engine, tokens[:-1])).hidden)
    total, pairs = torch.zeros((), dtype=torch.float64), tokens[1:]
    for depth, token in enumerate(path):
        last = models.nextn.final_norm(models.nextn.prefill(*_fresh(engine, pairs, states)).hidden[-1])
        above = torch.tensor(path[:depth], dtype=torch.int64).view(1, 1, depth)
        logp = process_logits(models.target.logits(last).view(1, 1, -1), sampling, above, above >= 0)
        total = total + (logp + noise[:, depth]).log_softmax(-1)[0, 0, token]
        states, pairs = torch.cat((states, last.unsqueeze(0))), [*pairs, token]
    return total


def _fresh(engine: Engine, tokens: list[int], states: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of one prefill over `tokens` into a cache of its own."""
    cfg, count = engine.worker.models.cfg, len(tokens)
    steps = torch.arange(count)
    page_table = torch.zeros(1, 1, dtype=torch.int64)
    inputs = PrefillInput(torch.tensor(tokens), steps, steps, page_table, (0, count), (0,))
    cache = torch.full((cfg.num_hidden_layers + 1, 1, count, cfg.latent_dim), float("nan")).double()
    return (inputs, cache) if states is None else (inputs, states, cache)


@pytest.mark.parametrize(("temperature", "frequency"), [(0.0, 0.0), (0.0, -1.5), (0.8, 0.0)])
@pytest.mark.parametrize("shape", ["3/3/12", "4/2/10", "5/4/24", "4/1/5"])
def test_each_tree_node_s_value_is_that_of_its_own_path(
    shape: str, temperature: float, frequency: float
) -> None:
    """A draft node continues its parent's state and sees its ancestors, not its column's (sglang#8409).

    Penalties count the path too, and each level has the noise of its own position.
    """
    spec = SpecConfig.parse(shape)
    engine = tiny_engine(spec=spec, page_size=4)
    for row, length in enumerate((5, 12)):
        params = {"max_tokens": 60, "temperature": temperature, "frequency_penalty": frequency}
        engine.add(request(str(row), prompt_of(length, row), seed=row, **params))
    for _ in range(4):
        engine.step()
    worker, entries = engine.worker, engine.scheduler.running
    batch = _batch(*entries)
    sampling = worker.state.sampling_batch(batch)
    noise = level_noise(sampling, worker.state.n[batch.rows] + 1, spec.num_steps, 40, torch.float64)
    with torch.inference_mode():
        place = Place.behind(worker.state, batch, worker.state.n[batch.rows], spec.draft_tokens)
        tree = draft(worker.models, worker.state, batch, place, sampling, noise, spec, worker.options)
        for row, entry in enumerate(entries):
            tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
            for node in range(1, len(tokens)):
                path: list[int] = []
                at = node
                while at:
                    path.insert(0, tokens[at])
                    at = parents[at]
                assert_close(tree.logp[row, node], _chain_value(engine, entry, path), "fp64")


@pytest.mark.parametrize("shape", ["3/4/8", "5/8/32", "7/1/8"])
def test_penalties_that_invite_repetition_count_the_node_s_own_path(shape: str) -> None:
    """With rewards for repeating, the text depends on each token of an accepted run (sglang#22049)."""
    settings = [
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0, "repetition_penalty": 0.5},
        {"presence_penalty": -2.0, "frequency_penalty": 1.0, "temperature": 1.0},
        {"repetition_penalty": 0.5, "frequency_penalty": 0.7, "temperature": 0.5},
        {"frequency_penalty": 0.6},
        {"presence_penalty": 2.0, "temperature": 0.3},
    ]
    params = [{"max_tokens": 60, "temperature": 0.0, "seed": r, **p} for r, p in enumerate(settings)]
    engine = tiny_engine(spec=SpecConfig.parse(shape))
    texts = run(engine, [request(str(r), prompt_of(6, r), **p) for r, p in enumerate(params)])
    for row, each in enumerate(params):
        assert texts[str(row)] == _plain(prompt_of(6, row), **each)


@pytest.mark.parametrize("shape", ["6/2/12", "7/1/8", "7/3/20", "63/1/64", "2/32/64", "1/40/30"])
def test_trees_of_any_depth_and_width_give_the_plain_text(shape: str) -> None:
    """Deeper and wider than the defaults, up to the limits (ds4#358)."""
    for temperature in (0.0, 0.9):
        params = {"max_tokens": 16, "temperature": temperature, "seed": 1}
        engine = tiny_engine(spec=SpecConfig.parse(shape), page_size=4, num_pages=256)
        texts = run(engine, [request(str(r), prompt_of(5 + r, r), **params) for r in range(2)])
        assert texts == {str(r): _plain(prompt_of(5 + r, r), **params) for r in range(2)}


@cache
def _demo() -> LLM:
    return LLM("demo", device="cpu", dtype="float64", max_model_len=256, num_pages=64, max_draft_tokens=32)


@pytest.mark.parametrize("shape", ["off", "3/4/8"])
def test_the_text_ends_before_the_first_match_of_a_stop_string(shape: str) -> None:
    """Stop strings inside a run, over two runs, over several tokens and characters (sglang#23802)."""
    llm, prompt = _demo(), "import os\nimport sys\n\n\ndef main("
    llm.engine.set_spec(None)
    whole = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0))[0].text
    stops = [whole[at : at + width] for at in range(1, len(whole) - 8, 9) for width in (3, 8)]
    llm.engine.set_spec(None if shape == "off" else SpecConfig.parse(shape))
    params = [SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,)) for stop in stops]
    completions = llm.generate([prompt] * len(stops), params)
    for stop, completion in zip(stops, completions, strict=True):
        assert (completion.text, completion.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_acceptance_counts_only_tokens_that_were_delivered() -> None:
    """What a run holds beyond its request's end is in no figure (sglang#39826)."""
    engine = tiny_engine(spec=SPEC)
    for row in range(8):
        engine.add(request(str(row), prompt_of(9, row), max_tokens=2 + row % 4, temperature=0.0))
    outputs = list(drain(engine))
    delivered = sum(len(output.token_ids) for output in outputs)
    assert engine.counters.generated_tokens == delivered
    first_tokens = 8  # of prefill, which no cycle emits
    assert engine.counters.acceptance.emitted == delivered - first_tokens


def test_a_model_that_computes_nan_ends_its_requests_with_an_error() -> None:
    """Not with token 0 for ever, every draft of it accepted (sglang#36537)."""
    models = tiny_models(seed=77)  # a seed of its own: tiny_models are shared
    models.target.norm.weight.data[0] = float("nan")
    engine = tiny_engine(models, spec=SPEC)
    engine.add(request("r", prompt_of(9, 0), max_tokens=30, temperature=0.0))
    assert list(drain(engine))[-1].finish_reason == "error"


@pytest.mark.parametrize("topk", [41, 100_000])
def test_more_children_than_the_vocabulary_are_refused_at_the_start(topk: int) -> None:
    """A shape that cannot run is an argument error, not a failure of the first step (sglang#5160)."""
    with pytest.raises(ConfigError, match="vocabulary"):
        tiny_engine(spec=SpecConfig(1, topk, 4))


def test_a_checkpoint_without_nextn_layer_decodes_plainly_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tree is asked for, nothing can draft: a warning and the plain text (sglang#9508, #36528)."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_nextn_predict_layers": 0}))
    llm = LLM(tmp_path, load_format="dummy", device="cpu", spec=SPEC, num_pages=8)
    assert llm.engine.spec is None
    assert "no NextN layer" in caplog.text
    completion = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    assert (len(completion.token_ids), completion.acceptance.cycles) == (6, 0)


def test_the_page_budget_counts_the_nextn_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that is allocated, draft layer included, stays within its bytes (sglang#6875)."""
    cfg = tiny_models().cfg
    config = EngineConfig(device="cpu", page_size=16)
    bytes_a_page = 16 * cfg.latent_dim * 8 * (cfg.num_hidden_layers + 1)
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 10 * bytes_a_page - 1)
    plan = memory.plan_memory(cfg, config, torch.device("cpu"), torch.float64, 512)
    assert plan.num_pages == 9


def _steps(engine: Engine, prompt: list[int], params: dict[str, Any]) -> int:
    """Outputs, so engine steps, that one request takes."""
    engine.add(request("alone", prompt, **params))
    return len(list(drain(engine)))


def test_pressure_passes_and_decoding_is_as_before() -> None:
    """Preemption is bounded by the pressure: no request is preempted again and again (sglang#26248)."""
    tight = tiny_engine(spec=SPEC, page_size=4, num_pages=34, max_model_len=128, max_running_requests=6)
    requests = [request(str(r), prompt_of(9, r), max_tokens=70, temperature=0.7, seed=r) for r in range(6)]
    run(tight, requests)
    assert 0 < tight.scheduler.num_preemptions <= 2 * len(requests)
    spent = tight.scheduler.num_preemptions
    params = {"max_tokens": 70, "temperature": 0.7, "seed": 0}
    fresh = tiny_engine(spec=SPEC)
    assert _steps(tight, prompt_of(9, 0), params) == _steps(fresh, prompt_of(9, 0), params)
    assert tight.scheduler.num_preemptions == spent
