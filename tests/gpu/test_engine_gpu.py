"""The engine on a CUDA device: the same proofs as on a CPU, and the demo end to end."""

from __future__ import annotations

import warnings

import pytest
import torch

from nextn import LLM, SamplingParams
from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.memory import plan_memory
from nextn.errors import CapacityError
from nextn.kernels import ops
from nextn.kernels.ref import kv_cache as ref_kv_cache
from tests.compare import assert_close
from tests.tiny import TINY, prompt_of, request, run, tiny_engine, tiny_models

pytestmark = pytest.mark.gpu
SHAPES = ("1/1/2", "1/4/4", "2/4/4", "3/1/4", "3/4/8", "5/8/32")
PROMPTS = (
    "To install the package",
    "The capital of France is",
    "def read_lines(path):\n",
    "Once upon a time",
)


def _requests(temperature: float) -> list:  # type: ignore[type-arg]
    return [
        request(str(r), prompt_of(5 + 9 * r, r), max_tokens=40, temperature=temperature, seed=r)
        for r in range(4)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_gives_the_tokens_of_plain_decoding_in_float64(shape: str, temperature: float) -> None:
    """Token for token, with small pages and chunks, batch of four."""
    models = tiny_models(device_name="cuda")
    engine = tiny_engine(
        models, spec=SpecConfig.parse(shape), page_size=4, num_pages=600, chunked_prefill_size=8
    )
    plain = tiny_engine(models, spec=None)
    assert run(engine, _requests(temperature)) == run(plain, _requests(temperature))
    assert engine.counters.acceptance.length > 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gpu_gives_the_cpu_s_tokens_in_float64(temperature: float) -> None:
    """Same weights, same seeds: the device does not matter, the noise included."""
    spec = SpecConfig(2, 4, 4)
    on_gpu = run(tiny_engine(tiny_models(device_name="cuda"), spec=spec), _requests(temperature))
    assert on_gpu == run(tiny_engine(spec=spec), _requests(temperature))


def test_a_decode_step_asks_the_host_nothing_until_its_result_is_read() -> None:
    """draft, verify, accept and commit launch without a synchronisation, as a captured graph will need."""
    models = tiny_models(dtype=torch.float32, device_name="cuda")
    engine = tiny_engine(models, spec=SpecConfig(3, 2, 5))
    for each in _requests(0.8):
        engine.add(each)
    while any(not e.is_prefilled for e in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    from nextn.engine.step import plain_step, spec_step

    worker = engine.worker
    batch = worker._batch(engine.scheduler.running)
    with torch.inference_mode():
        spec_step(worker.models, worker.state, batch, SpecConfig(3, 2, 5), worker.options)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            accepted = spec_step(worker.models, worker.state, batch, SpecConfig(3, 2, 5), worker.options)
            plain_step(worker.models, worker.state, batch, worker.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(accepted.length.min()) >= 1


@pytest.mark.parametrize("width", [80, 576])
def test_compaction_equals_its_twin_where_paths_overlap(width: int) -> None:
    """Many rows and layers, paths such as 0, 2, 5, in bfloat16, bit for bit; repeated to catch races."""
    layers, rows, tree = 5, 16, 8
    cache = torch.randn(layers, rows, tree, width, device="cuda").bfloat16()
    base = torch.arange(rows, device="cuda").unsqueeze(1) * tree
    path = torch.tensor([0, 2, 3, 5, 7], device="cuda")
    source, target = base + path, base + torch.arange(5, device="cuda")
    valid = torch.arange(5, device="cuda") <= (torch.arange(rows, device="cuda") % 5).unsqueeze(1)
    expected = cache.clone()
    ref_kv_cache.compact(expected, source, target, valid)
    for _ in range(50):
        actual = cache.clone()
        ops.compact(actual, source, target, valid)
        assert_close(actual, expected, "bitwise")


def test_fp8_weights_kept_on_the_device_answer_as_the_cpu_s_do() -> None:
    """The demo in float32: FP8 weights dequantised at use on the GPU, once at load on the CPU."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    on_gpu = LLM(
        "demo", device="cuda", dtype="float32", num_pages=64, max_model_len=512, max_running_requests=4
    )
    on_cpu = LLM(
        "demo", device="cpu", dtype="float32", num_pages=64, max_model_len=512, max_running_requests=4
    )
    left, right = on_gpu.generate(list(PROMPTS), params), on_cpu.generate(list(PROMPTS), params)
    assert [each.text for each in left] == [each.text for each in right]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_demo_s_text_in_float32_is_the_same_with_and_without_speculation(temperature: float) -> None:
    """On the device's default route but in float32, where a flip is a chance of one in 100,000 tokens."""
    llm = LLM("demo", device="cuda", dtype="float32", num_pages=64, max_model_len=512, max_running_requests=4)
    params = [SamplingParams(max_tokens=48, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    drafted = llm.generate(list(PROMPTS), params)
    assert llm.engine.counters.acceptance.length > 1.5
    llm.engine.set_spec(None)
    plain = llm.generate(list(PROMPTS), params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_the_demo_drafts_as_well_in_bfloat16_as_in_float32() -> None:
    """Acceptance is the draft's regression test: precision may move it by chance only."""
    lengths = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM("demo", device="cuda", dtype=dtype, num_pages=64, max_model_len=512, max_running_requests=4)
        llm.generate(list(PROMPTS), SamplingParams(max_tokens=96, temperature=0.0))
        lengths.append(llm.engine.counters.acceptance.length)
    assert abs(lengths[0] - lengths[1]) < 0.35, lengths


def test_a_dummy_model_is_made_in_fp8_on_the_device_and_decodes() -> None:
    """Random FP8 weights of a wider model: finite logits, tokens come out with and without a tree."""
    cfg = {
        **TINY, "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    from nextn.models.weights import build_models

    config = EngineConfig(device="cuda", load_format="dummy", num_pages=64, max_model_len=256)
    device = torch.device("cuda")
    models = build_models(None, ModelConfig.from_dict(cfg), config, device, torch.bfloat16, 300)
    engine = tiny_engine(models, spec=SpecConfig(2, 4, 4))
    texts = run(engine, _requests(0.0))
    assert all(len(tokens) == 40 for tokens in texts.values())


def test_a_cache_that_does_not_fit_is_refused_with_the_figure() -> None:
    """A memory fraction below what is taken leaves no page: a sentence, not a crash at the first request."""
    ballast = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    cfg = ModelConfig.from_dict(TINY)
    config = EngineConfig(device="cuda", mem_fraction=0.001)
    with pytest.raises(CapacityError, match="mem-fraction"):
        plan_memory(cfg, config, torch.device("cuda"), torch.bfloat16, 512)
    assert ballast.numel() == 1 << 30


def test_an_engine_on_the_gpu_plans_its_cache_from_free_memory() -> None:
    """Default settings give the demo a cache that holds all its requests at full length."""
    from nextn import demo

    engine = Engine.from_config(demo.path(), EngineConfig(device="cuda", max_running_requests=2))
    assert engine.pool.num_pages * engine.pool.page_size >= 2 * engine.max_model_len
