"""The embedded demo model: what ships drafts well, speaks, and speculates losslessly."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from nextn import LLM, SamplingParams, demo
from nextn.config import ModelConfig, SpecConfig
from nextn.engine.stats import Acceptance
from nextn.models import export
from nextn.models.checkpoint import read_header

PROMPTS = (
    "**To list the tags of a resource**\n\nThe following ``list-tags",
    "<｜User｜>What is 12 + 7 * 3?<｜Assistant｜>",
    "def read_lines(path):\n    ",
    "The population of the country is",
    "import os\nimport sys\n\n\ndef main(",
    "In the beginning",
)
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@cache
def _llm(dtype: str = "float32") -> LLM:
    return LLM("demo", device="cpu", dtype=dtype, max_model_len=512, num_pages=128, max_draft_tokens=32)


def _acceptance(llm: LLM, shape: str, params: SamplingParams) -> tuple[list[list[int]], Acceptance]:
    llm.engine.set_spec(SpecConfig.parse(shape))
    completions = llm.generate(list(PROMPTS), params)
    total = Acceptance()
    for completion in completions:
        total.merge(completion.acceptance)
    return [completion.token_ids for completion in completions], total


def test_the_package_s_demo_is_small_and_in_the_official_format() -> None:
    """At most 32 MB in all; FP8 blocks, one NextN layer without copies of the embedding and the head."""
    directory = demo.path()
    assert sum(file.stat().st_size for file in directory.iterdir() if file.is_file()) <= 32_000_000
    cfg = ModelConfig.from_dir(directory)
    assert cfg.has_nextn
    assert cfg.max_position_embeddings >= 32768
    assert (cfg.vocab_size <= 8192, cfg.hidden_size <= 384) == (True, True)
    names = read_header(directory / "model.safetensors")
    prefix = f"model.layers.{cfg.num_hidden_layers}."
    assert f"{prefix}eh_proj.weight" in names
    assert f"{prefix}embed_tokens.weight" not in names
    assert names[f"{prefix}mlp.experts.0.gate_proj.weight"].dtype == "F8_E4M3"


@pytest.mark.parametrize(("shape", "least"), [("2/4/4", 2.2), ("3/1/4", 2.2), ("1/1/2", 1.6)])
def test_the_acceptance_length_on_fixed_prompts_has_not_fallen(shape: str, least: float) -> None:
    """A wrong draft never shows in the text, only here."""
    _, acceptance = _acceptance(_llm(), shape, GREEDY)
    assert acceptance.length >= least, acceptance


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_demo_s_tokens_do_not_depend_on_the_tree(temperature: float) -> None:
    """Trees of any shape and plain decoding give the same tokens, in float64, greedy and sampled."""
    llm = _llm("float64")
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=5)
    texts = [_acceptance(llm, shape, params)[0] for shape in ("2/4/4", "3/1/4", "5/8/32")]
    llm.engine.set_spec(None)
    plain = [completion.token_ids for completion in llm.generate(list(PROMPTS), params)]
    assert texts == [plain] * 3


def test_coupled_drafting_accepts_more_of_the_demo_s_drafts_and_changes_no_token() -> None:
    """At T = 1 the draft that knows the noise is accepted more often."""
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=3)
    coupled = _llm()
    plain = LLM(
        "demo", device="cpu", dtype="float32", max_model_len=512, num_pages=128, coupled_drafting=False
    )
    left, right = _acceptance(coupled, "2/4/4", params), _acceptance(plain, "2/4/4", params)
    assert left[0] == right[0]
    assert left[1].length > right[1].length


def test_an_exported_draft_drafts_as_the_checkpoint_s_own(tmp_path: Path) -> None:
    """`nextn-export` and `--draft-model`: the same tokens and the same acceptance, cycle by cycle."""
    assert export.main(["--input-dir", str(demo.path()), "--output-dir", str(tmp_path / "draft")]) == 0
    exported = LLM(
        "demo",
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_pages=128,
        draft_model=str(tmp_path / "draft"),
    )
    assert _acceptance(exported, "2/4/4", GREEDY) == _acceptance(_llm(), "2/4/4", GREEDY)


def test_the_demo_answers_a_sum_over_its_chat_template() -> None:
    """Training on instructions shows: the answer to a small sum is right and ends by itself."""
    completion = _llm().chat([{"role": "user", "content": "What is 41 + 10 * 18?"}], GREEDY)
    assert "221" in completion.text
    assert completion.finish_reason == "stop"


def test_the_acceptance_benchmark_s_last_line_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench/acceptance.py: shape -> accept_length, first_accept_rate, by_depth; loops are counted apart."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    import acceptance

    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPTS[2]},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"turns": ["Define cat."]},
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    args = [
        "demo",
        "--prompts",
        str(prompts),
        "--max-tokens",
        "16",
        "--device",
        "cpu",
        "--shapes",
        "2/4/4,3/1/4",
    ]
    assert acceptance.main(args) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"2/4/4", "3/1/4"}
    for figures in result.values():
        assert set(figures) >= {"accept_length", "first_accept_rate", "by_depth", "outputs", "looping"}
        assert figures["outputs"] + figures["looping"] == 3
    assert acceptance.loops([1, 2, 3] * 10)
    assert not acceptance.loops(list(range(40)))
    del sys.modules["acceptance"]
