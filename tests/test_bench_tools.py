"""The benchmarks' own rules: no figure after a failed check, and sums that add up."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nextn.config import SpecConfig
from nextn.engine.bench import make_prompts, random_prompts
from tests.tiny import TINY, tiny_engine, tiny_models

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next case is; the failure is named and counted."""
    from bench import kernels

    def wrong() -> None:
        raise AssertionError("2 of 3 elements differ")

    monkeypatch.setattr(kernels, "time_calls", lambda _: 10.0)
    cases = [
        kernels.Case(name, 43_000_000, 0, lambda _, check=check: kernels.Runner(lambda: None, check, {}))
        for name, check in (("bad", wrong), ("good", lambda: None))
    ]
    results, failed = kernels.run_family("gemm", cases, kernels.Peaks(4300.0, 800.0), tune=True)
    assert failed == 1
    assert [(each.case, each.gb_per_s, each.share) for each in results] == [("good", 4300.0, 1.0)]
    assert "FAILED gemm: bad: 2 of 3" in capsys.readouterr().out


def test_every_kernel_family_has_cases() -> None:
    """One file a family, each with a name, bytes to move, and something to make."""
    from bench import kernels

    for family in kernels.families():
        cases = importlib.import_module(f"bench.kernel_cases.{family}").cases()
        assert cases, family
        assert len({case.name for case in cases}) == len(cases), family
        assert all(case.bytes > 0 and callable(case.make) for case in cases), family


def test_no_cycle_is_timed_when_captured_and_single_launches_disagree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit status 1, a sentence, and no file."""
    from bench import cycles

    engine = tiny_engine(spec=SpecConfig(2, 4, 4))
    monkeypatch.setattr(cycles, "_engine", lambda *_: engine)
    cases = tuple(cycles.Case(16, batch, "plain", "real", 6.0, 3.8) for batch in (1, 2))
    monkeypatch.setattr(cycles, "CASES", cases)
    monkeypatch.setattr(cycles, "captured_steps_agree", lambda _engine, batch, _specs: batch != 2)
    assert cycles.main(["demo", "--jsonl", str(tmp_path / "out.jsonl")]) == 1
    assert " ms" not in capsys.readouterr().out
    assert not (tmp_path / "out.jsonl").exists()


def test_cycles_are_measured_against_targets_and_a_baseline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three cases on one batch of rows: fields in the JSON, the older figure and the verdict in the table."""
    from bench import cycles

    engine = tiny_engine(spec=SpecConfig(2, 4, 4))
    monkeypatch.setattr(cycles, "_engine", lambda *_: engine)
    cases = (
        cycles.Case(8, 2, "plain", "real", 1e9, 1.0),
        cycles.Case(8, 2, "2/4/4", "fixed", 1e-9, 1e-9),
        cycles.Case(8, 2, "3/1/4", "real"),
    )
    monkeypatch.setattr(cycles, "CASES", cases)
    monkeypatch.setattr(cycles, "FIXED_WARMUP", 8)
    old = tmp_path / "old.jsonl"
    old.write_text(json.dumps({"case": cases[0].name, "step_ms": 123.0}) + "\n")
    flags = ["demo", "--output-len", "6", "--jsonl", str(tmp_path / "new.jsonl"), "--baseline", str(old)]
    assert cycles.main(flags) == 0
    table = capsys.readouterr().out.splitlines()
    assert "was 123.0" in table[0]
    assert " ok " in table[0]
    assert "MISSED" in table[1]
    results = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert [each["case"] for each in results] == [case.name for case in cases]
    assert results[1]["accept_mode"] == "simulated"
    assert 0 < results[1]["distinct_experts"] <= TINY["n_routed_experts"]
    assert {"date", "torch", "triton", "commit", "verify_ms"} <= set(results[0])


def test_no_token_flips_between_chains_and_plain_steps_in_float64() -> None:
    """Exact enough arithmetic leaves nothing to decide: every position has the same best token."""
    from bench import flips

    text = torch.randint(2, TINY["vocab_size"], (3, 40))
    found = flips.flips(tiny_models(), text, 4)
    assert (found["positions"], found["flips"], found["rate"]) == (120, 0, 0.0)


def test_a_profile_counts_overlapping_launches_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Launches side by side, in any order, make the device busy for their union."""
    profile_step = _script("profile_step")
    spans = {"d": (10.0, 12.0), "b": (2.0, 3.0), "a": (0.0, 4.0), "c": (3.0, 6.0)}
    launches = [profile_step.Launch(name, *span) for name, span in spans.items()]
    profile_step.report(None, launches, 2, argparse.Namespace(batch_size=1, input_len=8))
    assert "0.006 ms a step, 2 launches a step, GPU busy 66.7 %" in capsys.readouterr().out
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::X>(int)"
    assert profile_step.short_name(name) == "vectorized_elementwise_kernel"


def test_a_profile_s_trace_makes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong path must not cost the run that it was to show."""
    profile_step = _script("profile_step")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(profile_step, "profile", lambda activities: torch.profiler.profile(activities=on_cpu))
    args = argparse.Namespace(
        batch_size=1, input_len=8, output_len=1, prompts=None, seed=0, simulate_accept_length=2.5
    )
    args.trace = tmp_path / "new" / "folder" / "step.json"
    profile_step.trace(tiny_engine(), None, args)
    assert "traceEvents" in json.loads((tmp_path / "new" / "folder" / "step-plain.json").read_text())


def test_profiling_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 with a sentence."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert _script("profile_step").main(["demo"]) == 2
    assert "there is none here" in capsys.readouterr().err


def test_a_case_s_prompts_are_the_same_in_every_run() -> None:
    """Random ids, fixed by the seed, for `bench.cycles` and `bench_one_batch` alike."""
    engine = tiny_engine()
    prompts = random_prompts(engine, 5, 2, 1)
    assert prompts == random_prompts(engine, 5, 2, 1)
    assert prompts == make_prompts(argparse.Namespace(prompts=None, input_len=5, seed=1), engine, 2)
    assert prompts[0] != prompts[1]


def test_options_of_a_batch_above_the_rows_are_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2, and the flag that would do."""
    from bench import options

    assert options.main(["nowhere", "--batch-size", "1", "32"]) == 2
    assert "--max-running-requests 16; raise it to 32" in capsys.readouterr().err


def test_options_keep_the_batches_before_one_that_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit status 1, with the figures of the batch that passed."""
    from bench import options

    monkeypatch.setattr(options.Engine, "from_config", lambda *_: tiny_engine(max_running_requests=2))
    monkeypatch.setattr(options, "resolve_model", Path)
    monkeypatch.setattr(options, "captured_steps_agree", lambda _engine, batch, *_, **__: batch == 1)
    monkeypatch.setattr(options, "CYCLES", 3)
    monkeypatch.setattr(options, "CASES", {name: options.CASES[name] for name in list(options.CASES)[-2:]})
    monkeypatch.setitem(options.CASES, "every option, 20 logprobs", (0.8, {"logprobs": 2}))
    monkeypatch.setitem(options.CASES, "every option", (0.8, {"top_k": 5}))
    path = tmp_path / "out.jsonl"
    flags = ["--batch-size", "1", "2", "--context", "8", "--spec", "off", "--jsonl", str(path)]
    assert options.main(["demo", *flags]) == 1
    assert [json.loads(text)["batch_size"] for text in path.read_text().splitlines()] == [1, 1]


def test_json_lines_are_written_as_they_come_and_replace_an_older_file(tmp_path: Path) -> None:
    """The older file stays until there is a first result; each line is there before the next is made."""
    from bench.jsonl import write_jsonl

    path = tmp_path / "out.jsonl"
    path.write_text("older\n")
    seen = []

    def results() -> Iterator[dict[str, object]]:
        for number in range(3):
            seen.append(path.read_text())
            yield {"number": number}

    assert write_jsonl(path, results()) == [{"number": number} for number in range(3)]
    assert seen == ["older\n", '{"number": 0}\n', '{"number": 0}\n{"number": 1}\n']
    assert write_jsonl(None, results()) == [{"number": number} for number in range(3)]
