"""Captured decode steps on a CUDA device: the same bits as single launches, whatever batch shares a graph."""

from __future__ import annotations

import pytest
import torch

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.bench import BatchRun
from nextn.engine.engine import Engine
from nextn.engine.graphs import Shape, StepGraphs
from nextn.engine.state import RowState
from nextn.engine.step import StepOptions
from nextn.engine.worker import Worker
from nextn.models.weights import Models, build_models
from tests.tiny import TINY, prompt_of, request, run

pytestmark = pytest.mark.gpu
SPEC = SpecConfig(2, 4, 4)
SHAPE = {
    **TINY, "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "vocab_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> Models:
    """Random FP8 weights of a model of four layers."""
    config = EngineConfig(device="cuda", load_format="dummy", num_pages=64, max_model_len=256)
    device = torch.device("cuda")
    return build_models(None, ModelConfig.from_dict(SHAPE), config, device, torch.bfloat16, 600)


def _engine(models: Models, spec: SpecConfig | None, *, graphs: bool, rows: int = 6) -> Engine:
    """An engine whose cache is full of NaN."""
    config = EngineConfig(device="cuda", spec=spec, page_size=16, num_pages=200, max_running_requests=rows)
    state = RowState(
        models.cfg,
        max_rows=rows,
        max_len=256 + 2 * config.largest_tree,
        num_pages=200,
        page_size=16,
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
    assert launched.copied is not None
    assert not launched.copied.query()
    assert launched.wait().tokens[0]


def test_graphs_of_every_bucket_and_shape_stay_small(models: Models) -> None:
    """Five buckets of two shapes share one pool."""
    engine = _engine(models, None, graphs=False, rows=16)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    graphs = StepGraphs(engine.worker.models, engine.worker.state, StepOptions(), 16)
    with torch.inference_mode():
        graphs.capture([Shape(None), Shape(SPEC)])
    assert free - torch.cuda.mem_get_info()[0] < 1 << 30
