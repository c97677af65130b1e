"""Captured decode steps on a CUDA device: the same bits as single launches, whatever batch shares a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextn import LLM
from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine import graphs as graphs_module
from nextn.engine import worker as worker_module
from nextn.engine.bench import BatchRun
from nextn.engine.engine import Engine
from nextn.engine.graphs import CATCH_UP, Shape, StepGraphs, run_step
from nextn.engine.request import Request
from nextn.engine.state import RING, RowState, StepBatch
from nextn.engine.stats import Acceptance
from nextn.engine.step import StepOptions
from nextn.engine.worker import Worker
from nextn.models.weights import Models, build_models
from tests.compare import assert_close
from tests.tiny import TINY, drain, prompt_of, request, run

pytestmark = pytest.mark.gpu
SPEC = SpecConfig(2, 4, 4)
SHAPE = {
    **TINY, "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "vocab_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def _random(shape: dict[str, Any]) -> Models:
    config = EngineConfig(device="cuda", load_format="dummy", num_pages=64, max_model_len=256)
    device = torch.device("cuda")
    return build_models(None, ModelConfig.from_dict(shape), config, device, torch.bfloat16, 600)


@pytest.fixture(scope="module")
def models() -> Models:
    """Random FP8 weights of a model of four layers."""
    return _random(SHAPE)


def _engine(
    models: Models, spec: SpecConfig | None, *, graphs: bool, rows: int = 6, page_size: int = 16
) -> Engine:
    """An engine whose cache is full of NaN."""
    config = EngineConfig(
        device="cuda", spec=spec, page_size=page_size, num_pages=200, max_running_requests=rows
    )
    state = RowState(
        models.cfg,
        max_rows=rows,
        max_len=256 + 2 * config.largest_tree,
        num_pages=200,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    state.cache.fill_(float("nan"))
    worker = Worker(models, state, StepOptions(), 256)
    if graphs:
        worker.capture(spec, rows)
    return Engine(worker, config, None, frozenset())


def _requests(count: int, temperature: float) -> list:  # type: ignore[type-arg]
    return [
        request(str(r), prompt_of(5 + 9 * r, r), max_tokens=10 + 7 * r, temperature=temperature, seed=r)
        for r in range(count)
    ]


@pytest.mark.parametrize("spec", [None, SPEC, SpecConfig(3, 1, 4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_captured_step_brings_the_bits_of_single_launches(
    models: Models, spec: SpecConfig | None, temperature: float
) -> None:
    """The same batch size, so the same kernels: results and states are equal bit for bit over many cycles."""
    tokens, states = [], []
    for eager in (False, True):
        engine = _engine(models, spec, graphs=True, rows=4)
        batch = BatchRun(engine, [prompt_of(5 + 9 * r, r) for r in range(4)], 100, temperature)
        tokens.append([batch.step(spec, eager=eager) for _ in range(8)])
        states.append(engine.worker.state)
    assert tokens[0] == tokens[1]
    for name in ("n", "root", "draft_state", "draft_len", "ring_hidden"):
        assert torch.equal(getattr(states[0], name)[:4], getattr(states[1], name)[:4]), name


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_attention_by_roles_in_a_captured_step_has_the_bits_of_single_launches(
    spec: SpecConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries as wide as DeepSeek's in pages of 64 take the kernel of attention_hopper; NaN around."""
    from nextn.kernels import attention, attention_hopper

    if not attention.runs_by_roles():
        pytest.skip("this device or this Triton cannot run it")
    launched = []
    launch = attention_hopper.launch
    monkeypatch.setattr(attention_hopper, "launch", lambda *args: launched.append(launch(*args)))
    wide = _random({**SHAPE, "kv_lora_rank": 512})
    tokens, caches = [], []
    for eager in (False, True):
        engine = _engine(wide, spec, graphs=True, rows=4, page_size=64)
        batch = BatchRun(engine, [prompt_of(5 + 45 * r, r) for r in range(4)], 100, 0.8)
        tokens.append([batch.step(spec, eager=eager) for _ in range(8)])
        caches.append(engine.worker.state.cache)
    assert launched
    assert tokens[0] == tokens[1]
    assert_close(caches[0], caches[1], "bitwise", what="cache")


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_batches_shrink_and_refill_between_buckets(models: Models, spec: SpecConfig | None) -> None:
    """Twelve requests over six rows end at different times; each gets its tokens, the same in every run."""
    engine = _engine(models, spec, graphs=True)
    requests = _requests(12, 0.0)
    texts = run(engine, requests)
    assert [len(texts[each.request_id]) for each in requests] == [each.params.max_tokens for each in requests]
    again = run(_engine(models, spec, graphs=True), _requests(12, 0.0))
    assert again == texts


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9, "top_k": 12, "min_p": 0.01}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}],
)
def test_shapes_that_were_not_captured_at_the_start_are_at_first_use(
    models: Models, params: dict[str, float]
) -> None:
    """Filters and penalties: the tokens are those of single launches of the same batch."""
    texts = []
    for graphs in (True, False):
        engine = _engine(models, SPEC, graphs=graphs, rows=2)
        requests = [
            request(str(r), prompt_of(9, r), max_tokens=20, temperature=0.8, seed=r, **params)
            for r in range(2)
        ]
        texts.append(run(engine, requests))
    assert texts[0] == texts[1]


def test_padded_rows_touch_nothing(models: Models) -> None:
    """Three rows in a bucket of four: the scratch row's pages and every page of nobody stay NaN."""
    engine = _engine(models, SPEC, graphs=True)
    for each in _requests(3, 0.8):
        engine.add(each)
    for _ in range(8):
        engine.step()
    held = {page for entry in engine.scheduler.running for page in entry.pages}
    free = [page for page in range(engine.pool.num_pages) if page not in held]
    assert engine.worker.state.cache[:, free].isnan().all()
    assert int(engine.worker.state.n[engine.worker.state.scratch_row]) == 0


def test_the_host_runs_ahead_of_the_device(models: Models) -> None:
    """Launching a step returns before the device has finished what was queued before it."""
    engine = _engine(models, SPEC, graphs=True)
    engine.add(request("a", prompt_of(9, 1), max_tokens=60, temperature=0.0))
    for _ in range(4):
        engine.step()
    entries = tuple(engine.scheduler.running)
    torch.cuda._sleep(200_000_000)  # about 0.1 s of the device's time
    launched = engine.worker.launch(entries, SPEC)
    assert launched.result.done is not None
    assert not launched.result.done.query()
    assert launched.wait().tokens[0]


def test_graphs_of_every_bucket_and_shape_stay_small(models: Models) -> None:
    """Five buckets of three shapes share one pool. Of this process: others may use the device meanwhile."""
    engine = _engine(models, None, graphs=False, rows=16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    recorded = StepGraphs(engine.worker.models, engine.worker.state, StepOptions(), 16)
    with torch.inference_mode():
        recorded.capture([Shape(None), Shape(SPEC), CATCH_UP])
    assert torch.cuda.memory_reserved() - before < 1 << 30


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_steps_and_the_trees_after_them_have_the_bits_of_single_launches(
    models: Models, temperature: float
) -> None:
    """More plain steps than the ring holds, caught up twice: tokens, rows and both caches are equal."""
    tokens, states = [], []
    for eager in (False, True):
        engine = _engine(models, SPEC, graphs=True, rows=4)
        batch = BatchRun(engine, [prompt_of(5 + 9 * r, r) for r in range(4)], 100, temperature)
        specs = [None] * (RING + 9) + [SPEC] * 5
        tokens.append([batch.step(spec, eager=eager) for spec in specs])
        states.append(engine.worker.state)
    assert tokens[0] == tokens[1]
    for name in ("n", "root", "draft_state", "draft_len", "ring_hidden", "ring_token"):
        assert_close(getattr(states[0], name)[:4], getattr(states[1], name)[:4], "bitwise", what=name)
    assert_close(states[0].cache, states[1].cache, "bitwise", what="cache")


def _uneven(models: Models) -> tuple[Engine, list[int]]:
    """Three rows whose drafts are behind by different amounts, and a poisoned scratch row; the rows."""
    engine = _engine(models, None, graphs=True)
    for r in range(3):
        engine.add(request(str(r), prompt_of(5 + 9 * r, r), max_tokens=100, temperature=0.8, seed=r))
        for _ in range(3 + 5 * r):
            engine.step()
    state = engine.worker.state
    state.n[state.scratch_row], state.draft_len[state.scratch_row] = 9, 2
    state.draft_state[state.scratch_row] = float("nan")
    state.ring_hidden[state.scratch_row] = float("nan")
    return engine, [entry.row for entry in engine.scheduler.running]


def test_a_captured_catch_up_has_the_bits_of_single_launches(models: Models) -> None:
    """Three rows in a bucket of four; what is padding, and every page of nobody, keeps its bits."""
    states = []
    for eager in (False, True):
        engine, rows = _uneven(models)
        state, recorded = engine.worker.state, engine.worker.graphs
        assert recorded is not None
        behind = (state.n - state.draft_len)[rows].tolist()
        assert len(set(behind)) == 3
        assert 0 < min(behind) < max(behind) <= RING
        with torch.inference_mode():
            if eager:
                padded = torch.tensor([*rows, state.scratch_row], device="cuda")
                batch = StepBatch(padded, padded < state.scratch_row, state.page_table.shape[1])
                run_step(models, state, batch, CATCH_UP, engine.worker.options)
            else:
                recorded.run(rows, CATCH_UP)
        assert torch.equal(state.draft_len[rows], state.n[rows])
        assert state.draft_state[rows].isfinite().all()
        assert int(state.draft_len[state.scratch_row]) == 2
        held = {page for entry in engine.scheduler.running for page in entry.pages}
        free = [page for page in range(engine.pool.num_pages) if page not in held]
        assert state.cache[:, free].isnan().all()
        states.append(state)
    for name in ("n", "draft_state", "draft_len", "cache"):
        assert_close(getattr(states[0], name), getattr(states[1], name), "bitwise", what=name)


def _long_requests() -> list[Request]:
    """More than there are rows, each for more than the ring's steps."""
    return [
        request(str(r), prompt_of(5 + 9 * r, r), max_tokens=45 + 12 * r, temperature=0.8 * (r % 2), seed=r)
        for r in range(8)
    ]


def test_plain_decoding_beside_a_draft_meets_no_eager_pass_and_no_capture(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings fill while rows come and go; the tokens are those of an engine without a NextN layer."""
    alone = Models(models.target, None, models.cfg)
    expected = run(_engine(alone, None, graphs=True), _long_requests())
    engine = _engine(models, SPEC, graphs=True)
    engine.set_spec(None)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("not recorded at the start")

    monkeypatch.setattr(graphs_module, "record", refuse)
    monkeypatch.setattr(worker_module, "run_step", refuse)
    assert run(engine, _long_requests()) == expected


def test_after_plain_decoding_the_demo_drafts_as_after_a_fresh_prefill() -> None:
    """One text goes on from 48 plain steps and from a prefill of them: caches and acceptance agree."""
    llm = LLM(
        "demo", device="cuda", num_pages=64, max_model_len=512, max_running_requests=4, prefix_cache=False
    )
    engine, spec = llm.engine, llm.engine.spec
    texts = (
        "To install the package",
        "The capital of France is",
        "def read_lines(path):\n",
        "Once upon a time",
    )
    requests = [request(text, llm.tokenizer.encode(text), max_tokens=144, temperature=0.0) for text in texts]
    engine.set_spec(None)
    for each in requests:
        engine.add(each)
    while min(len(each.output_tokens) for each in requests) < 48:
        engine.step()
    known = [each.prompt_tokens + each.output_tokens for each in requests]
    engine.set_spec(spec)
    engine.step()
    continued, after_plain = _draft_latents(engine, known), _accepted(engine)
    for each, tokens in zip(requests, known, strict=True):
        left = each.params.max_tokens - (len(tokens) - len(each.prompt_tokens))
        engine.add(request(each.request_id, tokens, max_tokens=left, temperature=0.0))
    while engine.scheduler.waiting or not all(entry.is_prefilled for entry in engine.scheduler.running):
        engine.step()
    fresh, after_prefill = _draft_latents(engine, known), _accepted(engine)
    apart = (continued - fresh).norm(dim=-1) / fresh.norm(dim=-1)
    assert float(apart.median()) < 0.02
    assert float(apart.quantile(0.95)) < 0.1
    assert after_prefill.length > 1.5
    assert abs(after_plain.length - after_prefill.length) < 0.2, (after_plain, after_prefill)


def _draft_latents(engine: Engine, known: list[list[int]]) -> torch.Tensor:
    """NextN's entries of the running rows, of the pairs that `known` tokens make, row after row.  # [N, C]"""
    state = engine.worker.state
    entries = []
    for entry, tokens in zip(engine.scheduler.running, known, strict=True):
        positions = torch.arange(len(tokens) - 1, device=state.device).unsqueeze(0)
        slots = state.slots(state.page_table[[entry.row]], positions)[0]
        entries.append(state.cache[-1].flatten(0, 1)[slots].float())
    return torch.cat(entries)


def _accepted(engine: Engine) -> Acceptance:
    """Run all open requests to their end; what their trees accepted."""
    total = Acceptance()
    for output in drain(engine):
        if output.finish_reason is not None:
            total.merge(output.acceptance)
    return total
