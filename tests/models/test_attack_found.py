"""Faults found by attacking the checkpoint tools; each test says what should hold, and failed at first."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextn.errors import CheckpointError
from nextn.models import convert, export, loader
from nextn.models.checkpoint import INDEX_NAME
from nextn.models.convert import convert_checkpoint
from nextn.models.export import WEIGHTS_NAME, export_nextn
from nextn.models.fp8 import quantize_blocks
from nextn.models.progress import Progress
from nextn.models.random_checkpoint import write_random_checkpoint
from tests.models import output_job
from tests.models.checkpoints import Tensors, read_all, rewrite, small_config
from tests.models.test_families import build

LAYER = "model.layers.2."
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint with NextN in one file, and a tokenizer."""
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_random_checkpoint(small_config(), path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def model(fp8: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(fp8, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """scripts/make_checkpoint.py."""
    spec = importlib.util.spec_from_file_location("attacked_make_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def snapshot(directory: Path) -> dict[str, bytes]:
    """Names and bytes of a directory's files."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def run(source: Path, out: Path, **options: Any) -> export.ExportReport:
    return export_nextn(source, out, progress=False, **options)


# Wrong output, status 0


class Stop(Exception):
    """Ends a run in its middle."""


def test_a_run_whose_work_was_removed_does_not_publish_that_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.NAME.partial` is removed while a run goes on; a second run begins, and the first one ends before it.

    The first then ends with an error or with its own bytes, never with what the second has half-written.
    """
    output_job.write(tmp_path / "whole", count=1)
    out, fsync, todo = tmp_path / "out", os.fsync, [True]

    def cut(name: str) -> None:
        if name == "layer.0.BF16":
            raise Stop

    def remove_and_begin_again(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part") and todo:
            todo.clear()
            shutil.rmtree(out.with_name(".out.partial"))
            with suppress(Stop):
                output_job.write(out, made=cut, count=1)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remove_and_begin_again)
    with suppress(CheckpointError):
        output_job.write(out, count=1)
    assert not todo
    assert not out.exists() or snapshot(out) == snapshot(tmp_path / "whole")


def at_the_first_byte(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, when the first bytes of weights have been written."""
    todo = [act]

    def advance(meter: Progress, nbytes: int) -> None:
        if todo:
            todo.pop()()

    monkeypatch.setattr(Progress, "advance", advance)


def test_a_source_that_changes_but_keeps_size_and_mtime_is_not_exported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file with the old one's time of change (cp -p, rsync -t) in its place is a change."""
    file = model / "model.safetensors"

    def replace() -> None:
        state, data = file.stat(), bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    at_the_first_byte(monkeypatch, replace)
    with pytest.raises(CheckpointError, match="changed while they were read"):
        run(model, tmp_path / "out")


def test_a_source_that_is_rewritten_after_its_header_was_read_is_not_exported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's stamp is older than the header: else offsets are stale, and --verify agrees with them."""
    check, file = loader._check_strays, model / "model.safetensors"
    expected = read_all(model)

    def rewrite_then_check(*args: Any) -> None:
        check(*args)
        save_file(load_file(file), tmp_path / "new", metadata={"comment": "x" * 801})
        (tmp_path / "new").replace(file)

    monkeypatch.setattr(loader, "_check_strays", rewrite_then_check)
    with suppress(CheckpointError):
        run(model, tmp_path / "out", verify=True)
    if (tmp_path / "out").exists():
        name = "self_attn.o_proj.weight"
        actual = read_all(tmp_path / "out")[f"model.layers.0.{name}"]
        assert torch.equal(actual.view(torch.uint8), expected[LAYER + name].view(torch.uint8))


PLAIN = "self_attn.o_proj"


def with_a_plain_layer(tensors: Tensors) -> None:
    """o_proj of the NextN layer in bf16, as config.json's list says."""
    name = f"{LAYER}{PLAIN}.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = torch.ones(tensors[name].shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("command", ["export", "convert"])
def test_a_module_that_was_quantised_is_on_no_list_of_plain_modules(
    fp8: Path, tmp_path: Path, command: str
) -> None:
    """Engines that trust the list would read e4m3 codes as bf16."""
    source = rewrite(fp8, tmp_path / "source", with_a_plain_layer)
    config = small_config()
    config["quantization_config"] |= {"modules_to_not_convert": ["lm_head", LAYER + PLAIN]}
    (source / "config.json").write_text(json.dumps(config))
    if command == "export":
        run(source, tmp_path / "out", dtype="fp8")
    else:
        convert_checkpoint(source, tmp_path / "out", "fp8", progress=False)
    after = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    tensors = read_all(tmp_path / "out")
    listed = after.get("modules_to_not_convert", [])
    assert not [name for name in listed if f"{name}.weight_scale_inv" in tensors]


def test_a_list_of_plain_modules_that_is_one_string_is_not_cut_into_letters(
    model: Path, tmp_path: Path
) -> None:
    """It is kept as it is, or refused."""
    config = small_config()
    config["quantization_config"] |= {"modules_to_not_convert": "lm_head"}
    (model / "config.json").write_text(json.dumps(config))
    with suppress(CheckpointError):
        run(model, tmp_path / "out")
        after = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert after["modules_to_not_convert"] in ("lm_head", ["lm_head"])


# What is not ours is lost


def test_force_does_not_replace_a_model_that_holds_an_exported_layer_too(
    fp8: Path, model: Path, tmp_path: Path
) -> None:
    """A file of that name does not make a directory an earlier export."""
    (model / WEIGHTS_NAME).write_bytes(b"")
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="not an earlier output"):
        run(fp8, model, force=True)
    assert snapshot(model) == before


def test_force_does_not_replace_an_export_of_a_conversion_by_a_conversion(fp8: Path, tmp_path: Path) -> None:
    """The record of a conversion is not copied into what is exported from it."""
    convert_checkpoint(fp8, tmp_path / "converted", "bf16", progress=False)
    run(tmp_path / "converted", tmp_path / "draft")
    with pytest.raises(CheckpointError, match="not an earlier output"):
        convert_checkpoint(fp8, tmp_path / "draft", "bf16", force=True, progress=False)


def test_a_source_in_the_outputs_working_directory_is_kept(fp8: Path, tmp_path: Path) -> None:
    """What a killed run left whole is given as --input-dir of a run that writes the same output."""
    work = tmp_path / ".out.partial"
    shutil.copytree(fp8, work / "output")
    for name in ("lock", "plan.json"):
        (work / name).write_text("")
    with suppress(CheckpointError):
        run(work / "output", tmp_path / "out")
    assert (work / "output").exists()
    assert snapshot(work / "output") == snapshot(fp8)


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_directory_with_the_working_directorys_name_that_no_run_made_is_kept(
    fp8: Path, tmp_path: Path, kind: str
) -> None:
    """Refused or written around, but not emptied."""
    work = tmp_path / ".out.partial"
    mine = work if kind == "directory" else tmp_path / "elsewhere"
    (mine / "notes").mkdir(parents=True)
    (mine / "notes" / "diary.txt").write_text("mine")
    (mine / "letter.txt").write_text("mine too")
    if kind == "link":
        work.symlink_to(mine)
    with suppress(CheckpointError):
        run(fp8, tmp_path / "out")
    assert (mine / "notes" / "diary.txt").exists()
    assert (mine / "letter.txt").exists()


def test_an_interrupt_between_the_two_renames_puts_the_earlier_output_back(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only an OSError: `out` is as it was after any exception."""
    run(fp8, tmp_path / "out")
    before, rename = snapshot(tmp_path / "out"), Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        if path.name == "output":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(fp8, tmp_path / "out", force=True)
    assert (tmp_path / "out").exists()
    assert snapshot(tmp_path / "out") == before


# Right input that is refused, or too late


def test_a_bf16_draft_of_a_model_with_blocks_of_its_own_loads(tmp_path: Path) -> None:
    """A draft without FP8 has no block size that could differ from the target's."""
    config = small_config()
    config["quantization_config"] |= {"weight_block_size": [64, 64]}
    write_random_checkpoint(config, tmp_path / "model")
    run(tmp_path / "model", tmp_path / "draft", dtype="bf16")
    assert build(tmp_path / "model", tmp_path / "draft").nextn is not None


@pytest.mark.parametrize("value", [1e-44, 3e-43, 1e-45])
def test_the_smallest_finite_values_are_quantised_to_finite_ones(value: float) -> None:
    """Where amax / 448 is 0 in float32, the scale must not be: 0 / 0 is a NaN code."""
    weight = torch.zeros(4, 4)
    weight[0, 0] = value
    codes, scale = quantize_blocks(weight, (128, 128))
    assert codes.float().isfinite().all()
    assert (scale > 0).all()


def test_an_output_that_cannot_be_moved_is_known_before_anything_is_written(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty mount point (a volume): its work would lie on another disk, and EBUSY would come last."""
    out, rename, written = tmp_path / "out", Path.rename, []
    out.mkdir()

    def busy(path: Path, target: Path) -> Path:
        if path == out:
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    monkeypatch.setattr(Progress, "advance", lambda meter, nbytes: written.append(nbytes))
    with suppress(CheckpointError):
        run(fp8, out)
    assert not written or (out / WEIGHTS_NAME).exists()


# Tracebacks instead of a sentence, and sentences that blame the wrong file


def with_text(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def quantised(**fields: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        config = json.loads(text)
        config["quantization_config"] |= fields
        return json.dumps(config)

    return change


CONFIGS: dict[str, Callable[[str], str]] = {
    "infinite size": with_text('"vocab_size": 512', '"vocab_size": 1e999'),
    "integer of 5000 digits": with_text('"vocab_size": 512', '"vocab_size": ' + "9" * 5000),
    "size beyond an int64": with_text('"vocab_size": 512', '"vocab_size": 1' + "0" * 30),
    "shared experts below 0": with_text('"n_shared_experts": 1', '"n_shared_experts": -1'),
    "half a surrogate": with_text('"silu"', '"silu", "note": "\\ud800"'),
    "nested deeply": with_text('"silu"', '"silu", "note": ' + "[" * 99999 + "]" * 99999),
    "blocks of 0": quantised(weight_block_size=[0, 128]),
    "blocks below 0": quantised(weight_block_size=[-1, -1]),
    "list of numbers": quantised(modules_to_not_convert=[1]),
}


@pytest.mark.parametrize("tool", ["export", "convert", "make"])
@pytest.mark.parametrize("fault", CONFIGS)
def test_an_absurd_config_is_a_sentence_or_harmless(
    model: Path, tmp_path: Path, maker: ModuleType, capsys: pytest.CaptureFixture[str], fault: str, tool: str
) -> None:
    """No exception leaves `main`."""
    text = CONFIGS[fault](json.dumps(small_config()))
    (model / "config.json").write_text(text)
    out = ["--output-dir", str(tmp_path / "out")]
    if tool == "make":
        status = maker.main(["--config", str(model / "config.json"), *out])
    elif tool == "export":
        status = export.main(["--input-dir", str(model), *out])
    else:
        status = convert.main(["--input-dir", str(model), *out, "--dtype", "bf16"])
    assert status == 0 or ": " in capsys.readouterr().err.splitlines()[-1]


def test_a_config_of_an_exported_layer_makes_no_checkpoint(tmp_path: Path, maker: ModuleType) -> None:
    """Target and NextN layer would both be layer 0: a sentence, not an assertion."""
    config = small_config(architectures=["DeepseekV3ForCausalLMNextN"], num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    assert maker.main(["--config", str(tmp_path / "config.json"), "--output-dir", str(out)]) == 1


@pytest.mark.parametrize("tool", ["export", "convert", "make"])
@pytest.mark.parametrize("place", ["long name", "loop"])
def test_an_output_that_is_no_place_is_a_sentence(
    fp8: Path, tmp_path: Path, maker: ModuleType, place: str, tool: str
) -> None:
    """A name that no file system takes; a link to itself."""
    out = tmp_path / ("x" * 300 if place == "long name" else "loop")
    if place == "loop":
        out.symlink_to(out)
    arguments = ["--output-dir", str(out)]
    if tool == "make":
        assert maker.main(["--config", str(fp8), *arguments]) == 1
    elif tool == "export":
        assert export.main(["--input-dir", str(fp8), *arguments]) == 1
    else:
        assert convert.main(["--input-dir", str(fp8), *arguments, "--dtype", "bf16"]) == 1


def test_an_index_with_a_name_too_long_for_a_file_is_a_sentence(model: Path, tmp_path: Path) -> None:
    """It names a file that cannot exist."""
    table = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    table[LAYER + "enorm.weight"] = "x" * 300
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": table}))
    with pytest.raises(CheckpointError, match=r"do not exist|cannot be read"):
        run(model, tmp_path / "out")


def test_a_source_whose_name_is_not_utf8_is_converted(fp8: Path, tmp_path: Path) -> None:
    """The record names it; that must not fail when everything has been written."""
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model\xff"))
    shutil.copytree(fp8, source)
    convert_checkpoint(source, tmp_path / "out", "bf16", progress=False)
    assert (tmp_path / "out").is_dir()


def test_a_process_without_stderr_exports(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for it where a daemon closed it."""
    monkeypatch.setattr(sys, "stderr", None)
    run(fp8, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS_NAME).is_file()
