"""bench_one_batch: its last lines are JSON with the promised fields, and simulation does what it says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from nextn.config import SpecConfig
from nextn.engine.bench import BatchRun, main, simulated_lengths, spare_tokens
from nextn.engine.worker import leave_a_core_free
from nextn.errors import ConfigError
from tests.tiny import TINY, prompt_of, tiny_engine

FIELDS = {
    "model", "device", "batch_size", "input_len", "output_len", "num_steps", "topk", "draft_tokens",
    "accept_length", "cycle_ms", "draft_ms", "verify_ms", "accept_ms", "extend_ms", "plain_ms",
    "tokens_per_s", "plain_tokens_per_s", "accept_mode", "token_mode", "distinct_experts", "commit",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with a config.json alone, for dummy weights."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def _run(model: str, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    args = [
        model,
        "--load-format",
        "dummy",
        "--input-len",
        "9",
        "--output-len",
        "24",
        "--device",
        "cpu",
        *flags,
    ]
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_every_case_has_one_json_object_at_the_end(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two batch sizes, two objects, all promised fields, plain decoding beside speculation."""
    cases = _run(model, capsys, "--batch-size", "1", "3")
    assert [case["batch_size"] for case in cases] == [1, 3]
    for case in cases:
        assert set(case) >= FIELDS
        assert (case["num_steps"], case["topk"], case["draft_tokens"]) == (2, 4, 4)
        assert (case["accept_mode"], case["token_mode"]) == ("real", "real")
        phases = sum(case[f"{phase}_ms"] for phase in ("draft", "verify", "accept", "extend"))
        assert 0 < phases <= 2 * case["cycle_ms"]
        assert 0 < case["distinct_experts"] <= TINY["n_routed_experts"]


@pytest.mark.parametrize("mode", ["real", "fixed"])
def test_a_simulated_length_is_the_floor_or_the_ceiling_in_every_row(
    mode: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean 2.5 means cycles of 2 and 3 tokens, whatever the target would accept."""
    (case,) = _run(
        model, capsys, "--simulate-accept-length", "2.5", "--token-mode", mode, "--batch-size", "2"
    )
    assert set(case["accept_histogram"]) == {"2", "3"}
    assert (case["accept_mode"], case["token_mode"]) == ("simulated", mode)
    assert 2.0 < case["accept_length"] < 3.0


def test_simulated_lengths_have_the_asked_mean() -> None:
    """2.3 on average over many draws; a whole number is always itself."""
    lengths = list(itertools.islice(simulated_lengths(2.3, seed=1), 20_000))
    assert set(lengths) == {2, 3}
    assert abs(sum(lengths) / len(lengths) - 2.3) < 0.02
    assert set(itertools.islice(simulated_lengths(3.0, seed=1), 100)) == {3}


def test_plain_decoding_alone_is_measured_with_spec_off(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--spec off` leaves the speculative figures out."""
    (case,) = _run(model, capsys, "--spec", "off")
    assert case["plain_ms"] > 0
    assert "cycle_ms" not in case
    assert case["draft_tokens"] == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--simulate-accept-length", "4"], "must be 1 to 3 for the tree 2/4/4"),
        (["--token-mode", "fixed"], "needs --simulate-accept-length"),
        (["--spec", "off", "--simulate-accept-length", "2"], "drop --spec off"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--input-len", "2000"], "max_position_embeddings"),
        (["--prompts", "nowhere.jsonl"], "--prompts"),
    ],
)
def test_wrong_flags_end_with_a_sentence(
    flags: list[str], text: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, nothing on standard output, the remedy on standard error."""
    args = [model, "--load-format", "dummy", "--output-len", "8", "--device", "cpu"]
    if "--input-len" not in flags:
        args += ["--input-len", "8"]
    assert main([*args, *flags]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert "{" not in printed.out


def test_a_cache_that_cannot_be_allocated_is_refused_with_its_size(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """More memory than any machine has: a sentence, not a traceback."""
    args = [model, "--load-format", "dummy", "--device", "cpu", "--num-pages", str(2**30), "--input-len", "8"]
    assert main([*args, "--output-len", "8"]) == 2
    assert "cannot be allocated on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (16, 15)])
def test_one_core_is_left_free_unless_the_environment_decides(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread count is chosen, not left to whatever torch finds."""
    asked: list[int] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    leave_a_core_free()
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    leave_a_core_free()
    assert asked == [threads]


def test_batches_of_one_prompt_are_prefilled_alike_though_the_engine_has_a_prefix_cache() -> None:
    """What an earlier batch computed would change the steps of a later one, and so its rounding."""
    engine = tiny_engine(prefix_cache=True)
    for _ in range(2):
        run = BatchRun(engine, [prompt_of(40, 1)] * 2, 8, 0.0)
        assert max(entry.cached for entry in run.entries[:1]) == 0
        run.close()


def test_a_batch_above_the_rows_is_not_blamed_on_the_cache() -> None:
    """The sentence names the flag that helps, and nothing stays queued."""
    engine = tiny_engine(max_running_requests=2)
    with pytest.raises(ConfigError, match="--max-running-requests 2; raise it to 3"):
        BatchRun(engine, [prompt_of(4, 1)] * 3, 8, 0.0)
    assert not engine.has_work()
    BatchRun(engine, [prompt_of(4, 1)] * 2, 8, 0.0).close()


def test_a_run_ends_with_its_fastest_row_however_long_the_others_would_take() -> None:
    """Rows of uneven luck: nobody passes the limit that its request was let in with."""
    spec, tokens = SpecConfig(2, 2, 4), 30
    engine = tiny_engine(spec=spec, max_running_requests=4)
    run = BatchRun(engine, [prompt_of(4 + i, i) for i in range(4)], tokens + spare_tokens(spec), 0.0)
    measured = run.measure(spec, tokens)
    run.phases(spec)
    emitted = [len(entry.request.output_tokens) for entry in run.entries]
    assert min(emitted) < max(emitted) <= run.entries[0].request.params.max_tokens
    assert len(measured.cycle_ms) <= tokens
    run.close()
