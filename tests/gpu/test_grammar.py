"""Steps with grammars on a CUDA device, recorded in parts and launched op by op."""

from __future__ import annotations

import re

import pytest
import torch

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar, Grammars, Vocabulary
from nextn.engine.request import Request, SamplingParams
from nextn.engine.state import RowState
from nextn.engine.step import StepOptions
from nextn.engine.worker import Worker
from nextn.models.weights import Models, build_models
from tests.grammars import EOS, TOKENS, encode, spell
from tests.tiny import TINY, drain, prompt_of

pytestmark = pytest.mark.gpu
pytest.importorskip("llguidance")
SPEC = SpecConfig(2, 4, 4)
SHAPE = {
    **TINY, "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "vocab_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
PATTERN = "[ab]{3,9}(,[ab]{1,9}){2,3}"
ROWS = 5


@pytest.fixture(scope="module")
def models() -> Models:
    """Random FP8 weights of a model of four layers."""
    config = EngineConfig(device="cuda", load_format="dummy", num_pages=64, max_model_len=256)
    return build_models(None, ModelConfig.from_dict(SHAPE), config, torch.device("cuda"), torch.bfloat16, 600)


def _texts(
    models: Models, spec: SpecConfig | None, temperature: float, *, graphs: bool
) -> dict[str, list[int]]:
    """Answers of more requests than rows, every third one without a grammar."""
    config = EngineConfig(device="cuda", spec=spec, page_size=16, num_pages=200, max_running_requests=ROWS)
    state = RowState(
        models.cfg, max_rows=ROWS, max_len=256 + 2 * config.largest_tree, num_pages=200, page_size=16,
        dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    worker = Worker(models, state, StepOptions(), 256)
    if graphs:
        worker.capture(spec, ROWS)
    engine = Engine(worker, config, None, EOS)
    tokens = TOKENS + (b"",) * (models.cfg.vocab_size - len(TOKENS))
    engine.grammars = Grammars(lambda: Vocabulary(tokens, EOS, encode))
    for i in range(ROWS + 3):
        grammar = Grammar("regex", PATTERN) if i % 3 else None
        params = SamplingParams(40, temperature, seed=i, grammar=grammar, ignore_eos=grammar is None)
        engine.add(Request(str(i), prompt_of(4 + 3 * i, i), params))
    found: dict[str, list[int]] = {str(i): [] for i in range(ROWS + 3)}
    for output in drain(engine):
        assert output.error is None
        found[output.request_id] += output.token_ids
    return found


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_parts_give_texts_of_the_grammar(
    models: Models, spec: SpecConfig | None, temperature: float
) -> None:
    """Padded batches, rows with and without a grammar; the same in every run."""
    recorded = _texts(models, spec, temperature, graphs=True)
    for i, tokens in enumerate(recorded.values()):
        assert len(tokens) == 40 if i % 3 == 0 else re.fullmatch(PATTERN, spell(tokens))
    assert _texts(models, spec, temperature, graphs=True) == recorded
    launched = _texts(models, spec, temperature, graphs=False)
    assert all(re.fullmatch(PATTERN, spell(tokens)) for i, tokens in enumerate(launched.values()) if i % 3)
