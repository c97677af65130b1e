"""Configuration: what a config.json may say, and the sentence for what it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nextn.config import MAX_TREE_NODES, EngineConfig, ModelConfig, SpecConfig
from nextn.errors import CheckpointError, ConfigError
from tests.tiny import TINY

V3: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "dsv3-full.json").read_text())
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}


def test_the_softmax_scale_of_v3_is_the_published_one() -> None:
    """192^(-1/2) times the squared YaRN magnitude; without YaRN the plain root."""
    assert ModelConfig.from_dict(V3).softmax_scale == pytest.approx(0.1352337788, rel=1e-9)
    assert ModelConfig.from_dict(TINY).softmax_scale == pytest.approx(12**-0.5)


def test_both_spellings_of_the_rotary_settings_mean_the_same() -> None:
    """`rope_scaling` beside `rope_theta`, and the one dictionary `rope_parameters` of transformers 5."""
    old = ModelConfig.from_dict({**TINY, "rope_theta": 5000, "rope_scaling": YARN})
    new = {key: value for key, value in TINY.items() if key != "rope_theta"}
    modern = {"rope_type": "yarn", "rope_theta": 5000, **{k: v for k, v in YARN.items() if k != "type"}}
    assert ModelConfig.from_dict({**new, "rope_parameters": modern}) == old


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": "x"}, "wrong kind"),
        ({"num_hidden_layers": None}, "wrong kind"),
        ({"rope_scaling": ["yarn"]}, "wrong kind"),
        ({"quantization_config": {"weight_block_size": [128]}}, "wrong kind"),
        ({"eos_token_id": [1, "two"]}, "wrong kind"),
        ({"num_mtp_layers": 3, "num_nextn_predict_layers": 0}, "one NextN layer is supported"),
        ({"num_nextn_predict_layers": 2}, "one NextN layer is supported"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 512}}, "lacks factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear' is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"scoring_func": "tanh"}, "'tanh' is not supported"),
        ({"topk_method": "best"}, "'best' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"text_config": {}}, "text_config"),
        ({"index_topk": 64}, "sparse attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"qk_rope_head_dim": 3}, "must be even"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0 must be 1 to 8"),
        ({"num_experts_per_tok": 1000}, "must be 1 to 8"),
        ({"topk_group": 100}, "do not fit together"),
        ({"n_group": 7}, "do not fit together"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "fewer than"),
        ({"n_group": 8, "topk_group": 4}, "at least two experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ],
)
def test_an_unfit_config_json_is_refused_with_its_reason(change: dict[str, Any], text: str) -> None:
    """Other families, other formats and values of the wrong kind: one CheckpointError, never a traceback."""
    with pytest.raises(CheckpointError, match=text):
        ModelConfig.from_dict({**TINY, **change})


@pytest.mark.parametrize(
    "field", [key for key in TINY if key in {"vocab_size", "kv_lora_rank", "rms_norm_eps"}]
)
def test_a_missing_field_is_named(field: str) -> None:
    """Nothing is guessed that changes the computation."""
    with pytest.raises(CheckpointError, match=field):
        ModelConfig.from_dict({key: value for key, value in TINY.items() if key != field})


def test_an_absent_end_token_is_no_token() -> None:
    """Token 1 is an ordinary token unless the file says otherwise."""
    assert ModelConfig.from_dict({**TINY, "eos_token_id": None}).eos_token_ids == ()
    assert ModelConfig.from_dict({**TINY, "eos_token_id": [1, 7]}).eos_token_ids == (1, 7)


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff", "[" * 100_000])
def test_a_directory_without_a_readable_config_json_is_refused(content: str | None, tmp_path: Path) -> None:
    """Absent, half-written, not an object, not UTF-8."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("0/1/2", "--num-steps 0"),
        ("1/0/2", "--topk 0"),
        ("1/1/1", "--draft-tokens 1"),
        ("2/1/4", "--draft-tokens must be 3"),
        ("1/4/6", "use --draft-tokens 5 or less"),
        ("2/8/65", "is above 64"),
        ("10/8/8", "use --num-steps 9 or less"),
        ("2/4", "is not a tree shape"),
        ("a/b/c", "is not a tree shape"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_value_that_would_do(shape: str, text: str) -> None:
    """The sentence names the flag and, where there is one, the right value."""
    with pytest.raises(ConfigError, match=text):
        SpecConfig.parse(shape)


@pytest.mark.parametrize("shape", ["1/1/2", "1/4/5", "2/4/21", "9/8/64", "63/1/64", "5/8/32"])
def test_every_shape_that_fits_is_taken(shape: str) -> None:
    """The bounds themselves are allowed, and the shape prints as it was written."""
    spec = SpecConfig.parse(shape)
    assert str(spec) == shape
    assert spec.width == min(spec.num_steps, spec.draft_tokens - 1) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"max_running_requests": 0},
        {"max_running_requests": 10**21},
        {"num_pages": 10**21},
        {"num_pages": 2**30, "page_size": 2**20},
        {"page_size": 0},
        {"chunked_prefill_size": 0},
        {"max_prefill_ms": -1.0},
        {"max_prefill_ms": float("nan")},
        {"num_pages": 0},
        {"max_model_len": 1},
        {"mem_fraction": 0.0},
        {"mem_fraction": float("nan")},
        {"dtype": "int8"},
        {"draft_hidden": "middle"},
        {"load_format": "pickle"},
    ],
)
def test_an_impossible_engine_size_is_refused(change: dict[str, Any]) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="--"):
        EngineConfig(**change)


def test_the_kernels_masks_have_as_many_bits_as_a_tree_may_have_nodes() -> None:
    """Kernels import nothing of the package but each other, so the number stands twice."""
    from nextn.kernels.ref import attention

    assert attention.MAX_TREE_NODES == MAX_TREE_NODES
