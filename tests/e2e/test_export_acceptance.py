"""An exported draft in another dtype: the same greedy tokens, and as many of its drafts accepted.

tests/e2e/test_demo.py has the export that copies bytes, which drafts cycle by cycle as the checkpoint's own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn import LLM, SamplingParams, demo
from nextn.config import SpecConfig
from nextn.engine.stats import Acceptance
from nextn.models.convert import convert_checkpoint
from nextn.models.export import WEIGHTS_NAME, export_nextn
from tests.e2e.test_demo import PROMPTS

GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
SPREAD = 0.02
"""By how much the acceptance length may change where weights are rounded otherwise: a cycle or two of 75."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo in FP8, as it ships, and in bf16."""
    plain = tmp_path_factory.mktemp("models") / "bf16"
    convert_checkpoint(demo.path(), plain, "bf16", progress=False)
    return {"fp8": demo.path(), "bf16": plain}


@cache
def drafted(model: Path, dtype: str, draft: Path | None = None) -> tuple[list[list[int]], Acceptance]:
    """Tokens of the fixed prompts, and what became of the drafts."""
    options: dict[str, Any] = {} if draft is None else {"draft_model": str(draft)}
    llm = LLM(str(model), device="cpu", dtype=dtype, max_model_len=512, num_pages=128, **options)
    llm.engine.set_spec(SpecConfig.parse("2/4/4"))
    completions = llm.generate(list(PROMPTS), GREEDY)
    total = Acceptance()
    for completion in completions:
        total.merge(completion.acceptance)
    return [completion.token_ids for completion in completions], total


def test_a_bf16_export_of_fp8_is_what_a_bf16_engine_computes_with(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """There FP8 weights are rounded to bf16 when they are loaded: tokens and acceptance are equal exactly."""
    export_nextn(models["fp8"], tmp_path / "draft", dtype="bf16", progress=False)
    assert drafted(models["fp8"], "bfloat16", tmp_path / "draft") == drafted(models["fp8"], "bfloat16")


@pytest.mark.parametrize(("stored_as", "dtype"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_converted_draft_changes_no_token_and_hardly_the_acceptance(
    models: dict[str, Path], tmp_path: Path, stored_as: str, dtype: Any
) -> None:
    """In float64 the target decides alone what the tokens are; the draft's rounding shows in the lengths."""
    export_nextn(models[stored_as], tmp_path / "draft", dtype=dtype, progress=False)
    own = drafted(models[stored_as], "float64")
    exported = drafted(models[stored_as], "float64", tmp_path / "draft")
    assert exported[0] == own[0]
    assert abs(exported[1].length - own[1].length) <= SPREAD * own[1].length


def test_a_wrong_draft_shows_in_the_acceptance_and_nowhere_else(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The control of the two above: embedding and state swapped in eh_proj, and few drafts are accepted."""
    export_nextn(models["fp8"], tmp_path / "draft", dtype="bf16", progress=False)
    weights = load_file(tmp_path / "draft" / WEIGHTS_NAME)
    embedding, hidden = weights["model.layers.0.eh_proj.weight"].chunk(2, dim=1)
    weights["model.layers.0.eh_proj.weight"] = torch.cat((hidden, embedding), dim=1)
    save_file(weights, tmp_path / "draft" / WEIGHTS_NAME)
    own = drafted(models["fp8"], "float64")
    wrong = drafted(models["fp8"], "float64", tmp_path / "draft")
    assert wrong[0] == own[0]
    assert wrong[1].length < 0.75 * own[1].length
