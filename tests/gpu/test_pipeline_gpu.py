"""The pipeline on a CUDA device: no step waits for the host, and no answer changes by who runs beside."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nextn import LLM
from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.launched import Launched, LaunchedPrefill
from nextn.engine.request import Output, Request, SamplingParams
from nextn.engine.scheduler import PrefillBatch
from nextn.engine.state import RowState
from nextn.engine.step import StepOptions
from nextn.engine.worker import Worker
from nextn.models.weights import build_models
from tests.tiny import TINY, assert_idle, drain, prompt_of, request, run, tiny_engine, tiny_models, tokens_of

pytestmark = pytest.mark.gpu
SPEC = SpecConfig(2, 4, 4)
ROWS, PAGES = 6, 45
SHAPE = {
    **TINY, "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "vocab_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
SLEEP = 1_000_000_000
"""Cycles of the device: about half a second, against which the host's launches are short."""
LONG, SHORT = 0.4, 0.15
"""Seconds: `SLEEP` takes more than the one, launching a step that is compiled less than the other."""


@pytest.fixture(scope="module")
def worker() -> Worker:
    """Random FP8 weights of a model of four layers, graphs for six rows, and a small cache."""
    config = EngineConfig(device="cuda", load_format="dummy", num_pages=PAGES, max_model_len=512)
    device = torch.device("cuda")
    models = build_models(None, ModelConfig.from_dict(SHAPE), config, device, torch.bfloat16, 900)
    state = RowState(
        models.cfg,
        max_rows=ROWS,
        max_len=512 + 2 * SPEC.draft_tokens,
        num_pages=PAGES,
        page_size=16,
        dtype=torch.bfloat16,
        device=device,
    )
    found = Worker(models, state, StepOptions(), 512)
    found.capture(SPEC, ROWS)
    return found


def _engine(worker: Worker, spec: SpecConfig | None = SPEC) -> Engine:
    """A new engine over the worker's cache, which is full of NaN; its chunks do not depend on time."""
    worker.state.cache.fill_(float("nan"))
    config = EngineConfig(
        device="cuda", spec=SPEC, page_size=16, num_pages=PAGES, max_running_requests=ROWS,
        chunked_prefill_size=64, max_prefill_ms=0.0,
    )  # fmt: skip
    engine = Engine(worker, config, None, frozenset())
    engine.set_spec(spec)
    assert engine.depth == 2
    return engine


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 1},
    "everything": {
        "temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "logit_bias": ((5, 2.0),), "min_tokens": 2, "stop_token_ids": (7,),
        "logprobs": 3, "prompt_logprobs": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_prefill_step_asks_the_host_nothing_until_its_result_is_read(
    worker: Worker, options: dict[str, Any]
) -> None:
    """Rows that start, page tables, chunks that end a prompt and chunks that do not."""
    engine = _engine(worker)
    lengths = (5, 20, 150)  # the last one does not end in the first step
    for attempt in range(2):  # the first one compiles
        for index, length in enumerate(lengths):
            each = request(f"{attempt}-{index}", prompt_of(length, 3 * attempt + index), **options)
            engine.add(each)
        batch = engine.scheduler.next_batch(False)
        assert isinstance(batch, PrefillBatch)
        assert {chunk.is_last for chunk in batch.chunks} == {True, False}

        def launch(batch: PrefillBatch = batch) -> LaunchedPrefill:
            for chunk in batch.chunks:
                engine._start(chunk.entry)
            return engine.worker.prefill(batch.chunks)

        if attempt == 0:
            launched = launch()
        else:
            with _no_synchronisation():
                launched = launch()
        emitted = launched.wait()
        assert [len(tokens) for tokens in emitted.tokens] == [1] * len(launched.entries)
        assert all(0 <= tokens[0] < SHAPE["vocab_size"] for tokens in emitted.tokens)
        assert launched.seconds > 0
        if "prompt_logprobs" in options:
            for chunk in batch.chunks:
                done = chunk.start + chunk.length
                expected = min(done + 1, len(chunk.entry.request.prompt_tokens))
                assert len(chunk.entry.request.prompt_logprobs) == expected
        engine.close()
        engine.step()
        assert_idle(engine)


def _hold(what: Callable[[], object]) -> tuple[float, bool]:
    """Let the device sleep and do something meanwhile: its seconds, and whether the device still slept."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    slept = torch.cuda.Event()
    slept.record()
    started = time.perf_counter()
    what()
    return time.perf_counter() - started, not slept.query()


def test_the_host_runs_ahead_of_prefill_and_of_the_decode_behind_it(worker: Worker) -> None:
    """Two steps are launched while the device is busy with something else; only then does the host wait."""
    engine = _engine(worker)
    run(engine, [request("warm", prompt_of(40, 1), max_tokens=20, temperature=0.0)])
    engine.add(request("a", prompt_of(40, 2), max_tokens=20, temperature=0.0))
    kinds: list[type] = []

    def launch_two() -> None:
        assert engine._launch()
        assert engine._launch()
        kinds.extend(type(flying) for flying in engine._flying)

    seconds, still_asleep = _hold(launch_two)
    assert kinds == [LaunchedPrefill, Launched]
    assert still_asleep
    assert seconds < SHORT
    list(drain(engine))
    for depth, most in ((2, SHORT), (1, None)):
        engine.depth = depth
        engine.add(request(f"b{depth}", prompt_of(40, 2 + depth), max_tokens=20, temperature=0.0))
        seconds, still_asleep = _hold(engine.step)
        assert still_asleep == (depth == 2)
        assert seconds < most if most is not None else seconds > LONG
        list(drain(engine))


def test_a_prefill_s_seconds_are_the_device_s_own(worker: Worker) -> None:
    """What ran before it does not count."""
    engine = _engine(worker)
    run(engine, [request("warm", prompt_of(40, 1), max_tokens=2, temperature=0.0)])
    engine.add(request("a", prompt_of(40, 2), max_tokens=2, temperature=0.0))
    _hold(engine._launch)
    (launched,) = engine._flying
    assert isinstance(launched, LaunchedPrefill)
    outputs = list(drain(engine))
    assert len(tokens_of(outputs)["a"]) == 2
    assert 0 < launched.seconds < LONG


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_steps_in_flight_give_the_tokens_of_each_request_alone_in_float64(
    spec: SpecConfig | None, temperature: float
) -> None:
    """Chunks, shared prefixes, choices, a small pool and aborts; exactly, with the cache and without."""
    gpu = tiny_models(device_name="cuda")

    def requests() -> list[Request]:
        stem = prompt_of(30, 0)
        found = []
        for r in range(8):
            prompt = [*stem[: (0, 12, 30)[r % 3]], *prompt_of(3 + 5 * r, r)] if r < 6 else list(stem)
            params = SamplingParams(
                max_tokens=6 + 4 * r, temperature=temperature, seed=r // 2, ignore_eos=True
            )
            found.append(Request(str(r), prompt, params, choice=r % 2))
        return found

    alone = {}
    for each in requests():
        alone |= run(tiny_engine(gpu, spec=None, max_running_requests=1, prefix_cache=False), [each])
    for cache in (True, False):
        engine = tiny_engine(
            gpu, spec=spec, page_size=4, num_pages=60, max_model_len=120, chunked_prefill_size=16,
            max_running_requests=4, prefix_cache=cache,
        )  # fmt: skip
        engine.depth = 2
        for each in requests():
            engine.add(each)
        engine.add(request("gone", prompt_of(50, 9), max_tokens=20, temperature=temperature))
        outputs: list[Output] = []
        for _ in range(14):
            outputs += engine.step()
            engine.check_integrity()
        engine.abort("gone")
        outputs += list(drain(engine))
        tokens = tokens_of(outputs)
        assert {name: tokens[name] for name in alone} == alone
        assert (engine.counters.cached_tokens > 0) == cache


def _mixed(count: int) -> list[Request]:
    """Short and long prompts, some of which begin alike, greedy and sampled, with and without options."""
    stem = prompt_of(100, 0)
    found = []
    for r in range(count):
        prompt = [*stem[: (0, 50, 100)[r % 3]], *prompt_of(5 + 23 * r % 160, r)]
        params = {"max_tokens": 5 + 11 * r % 40, "temperature": 0.8 * (r % 2), "seed": r}
        extra = ({}, {"top_p": 0.9}, {"logprobs": 2}, {"frequency_penalty": 0.4}, {"prompt_logprobs": 1})[
            r % 5
        ]
        found.append(request(str(r), prompt, **params, **extra))
    return found


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_a_mixed_load_in_bfloat16_ends_whole_and_the_same_every_time(
    worker: Worker, spec: SpecConfig | None
) -> None:
    """Requests come at every third step into a pool too small for all; NaN in a free page reaches nobody."""
    answers = []
    for _ in range(2):
        engine = _engine(worker, spec)
        left = _mixed(16)
        wanted = {each.request_id: each.params.max_tokens for each in left}
        outputs: list[Output] = []
        step = 0
        while left or engine.has_work():
            if left and step % 3 == 0:
                engine.add(left.pop(0))
            outputs += engine.step()
            engine.check_integrity()
            step += 1
        assert_idle(engine)
        tokens = tokens_of(outputs)
        assert {name: len(each) for name, each in tokens.items()} == wanted
        finals = [output.request_id for output in outputs if output.finish_reason == "length"]
        assert sorted(finals) == sorted(wanted)
        assert engine.counters.cached_tokens > 0
        answers.append(tokens)
    assert answers[0] == answers[1]


TEXTS = (
    "To install the package",
    "The capital of France is",
    "def read_lines(path):\n",
    "Once upon a time",
)
NEAR = 0.5
"""Difference of log-probabilities up to which bfloat16 may turn one greedy token into another."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded model in bfloat16."""
    return LLM("demo", device="cuda", page_size=16, num_pages=160, max_model_len=512, max_running_requests=8)


def _demo(llm: LLM, **config: Any) -> LLM:
    """The same model and graphs in a new engine, with other fields of EngineConfig."""
    old, new = llm.engine, LLM.__new__(LLM)
    fields = {"device": "cuda", "page_size": 16, "num_pages": 160, "max_running_requests": 8, **config}
    new.engine = Engine(old.worker, EngineConfig(**fields), old.tokenizer, old.eos_token_ids)
    old.worker.state.cache.fill_(float("nan"))
    return new


def _greedy(llm: LLM, name: str, text: str, *, choice: int = 0) -> Request:
    prompt = llm.tokenizer.encode(text)
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=5, ignore_eos=True)
    return Request(name, prompt, params, choice)


def _agree(got: list[Output], alone: list[Output]) -> tuple[int, int]:
    """Tokens up to the first difference, and all; at the difference both tokens are about equally likely."""
    rated = [each for output in alone for each in output.logprobs]
    tokens = [token for output in got for token in output.token_ids]
    assert len(tokens) == len(rated)
    for place, (token, other) in enumerate(zip(tokens, rated, strict=True)):
        if token != other.token_id:
            assert other.logprob - dict(other.top).get(token, -math.inf) < NEAR, (
                f"another text from token {place} on"
            )
            return place, len(tokens)
    return len(tokens), len(tokens)


def test_the_demo_s_texts_under_load_are_those_of_each_request_alone(llm: LLM) -> None:
    """In bfloat16 by graphs: where a text differs from the request's alone, its tokens were nearly equal."""
    engine = _demo(llm, chunked_prefill_size=64).engine
    assert engine.depth == 2
    prompts = {f"{i}.{r}": text * (1 + 4 * r) for i, text in enumerate(TEXTS) for r in range(4)}
    left = [_greedy(llm, name, text) for name, text in prompts.items()]
    outputs: dict[str, list[Output]] = {name: [] for name in prompts}
    step = 0
    while left or engine.has_work():
        if left and step % 2 == 0:
            engine.add(left.pop(0))
        if step % 7 == 0:  # others come and go
            params = SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True)
            engine.add(Request(f"other {step}", prompt_of(40 + step % 50, step), params))
        if step % 7 == 4:
            engine.abort(f"other {step - 4}")
        for output in engine.step():
            if output.request_id in outputs:
                outputs[output.request_id].append(output)
        engine.check_integrity()
        step += 1
    assert_idle(engine)
    single = _demo(llm, prefix_cache=False).engine
    single.depth = 1
    agreed = total = 0
    for name, text in prompts.items():
        single.add(_greedy(llm, name, text))
        found, count = _agree(outputs[name], list(drain(single)))
        agreed, total = agreed + found, total + count
    assert agreed > total / 3


def test_choices_share_the_prompt_s_pages_on_the_device(llm: LLM) -> None:
    """n > 1: the first one computes the prompt, the others its last page; greedy, they say the same."""
    engine, text = _demo(llm).engine, TEXTS[2] * 12
    length = len(llm.tokenizer.encode(text))
    for choice in range(4):
        engine.add(_greedy(llm, f"g.{choice}", text, choice=choice))
    outputs: dict[str, list[Output]] = {f"g.{choice}": [] for choice in range(4)}
    for output in drain(engine):
        outputs[output.request_id].append(output)
    cached = [each[-1].cached_tokens for each in outputs.values()]
    assert length > 3 * 16
    assert cached == [0, *[(length - 1) // 16 * 16] * 3]
    assert engine.counters.prompt_tokens == 4 * length - sum(cached)
    for each in outputs.values():
        _agree(each, outputs["g.0"])
    assert engine.counters.acceptance.length > 1.3
    sampled = [
        Request(f"s.{choice}", llm.tokenizer.encode(text), SamplingParams(max_tokens=40, seed=1), choice)
        for choice in range(4)
    ]
    texts = run(engine, sampled)
    assert len({tuple(tokens) for tokens in texts.values()}) > 1


def test_the_demo_drafts_as_well_behind_a_hit_as_behind_a_prefill(llm: LLM) -> None:
    """Wrong draft entries in cached pages would only show in the acceptance."""
    lengths = []
    for cache in (True, False):
        offline = _demo(llm, prefix_cache=cache)
        prompts = [text * 8 for text in TEXTS]
        params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        offline.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
        before = offline.engine.counters.acceptance
        cycles, emitted = before.cycles, before.emitted
        completions = offline.generate(prompts, params)
        assert all((each.cached_tokens > 0) == cache for each in completions)
        after = offline.engine.counters.acceptance
        lengths.append((after.emitted - emitted) / (after.cycles - cycles))
    assert abs(lengths[0] - lengths[1]) < 0.3, lengths
