"""Export: the NextN layer alone, byte for byte, complete or not at all, and every refusal a sentence."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.models import export
from nextn.models.checkpoint import Checkpoint, copy_tensors, read_header
from nextn.models.export import export_nextn, main
from nextn.models.random_checkpoint import plan_checkpoint, write_random_checkpoint
from tests.compare import assert_close
from tests.models.checkpoints import Tensors, read_all, rewrite, small_config, write

WEIGHTS = "nextn_layer_parameters.safetensors"
PREFIX = "model.layers.2."
OTHER_FILES = {"tokenizer.json": "{}", "modeling_deepseek.py": "# code", "generation_config.json": "{}"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint with NextN in shards, among other files."""
    path = tmp_path_factory.mktemp("checkpoints") / "source"
    write_random_checkpoint(small_config(), path, shard_size=10**6)
    for name, text in OTHER_FILES.items():
        (path / name).write_text(text)
    (path / "pytorch_model.bin").write_bytes(b"old")
    (path / "figures").mkdir()
    return path


def run(source: Path, out: Path, **options: Any) -> export.ExportReport:
    return export_nextn(source, out, progress=False, **options)


def expected_tensors(source: Path) -> Tensors:
    left_out = (PREFIX + "embed_tokens.weight", PREFIX + "shared_head.head.weight")
    return {
        "model.layers.0." + name.removeprefix(PREFIX): tensor
        for name, tensor in read_all(source).items()
        if name.startswith(PREFIX) and name not in left_out
    }


def shards_with_layer(source: Path) -> set[str]:
    table = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for name, file in table.items() if name.startswith(PREFIX)}


def test_exported_tensors_are_the_layers_bytes(source: Path, tmp_path: Path) -> None:
    """One file holds exactly the layer's tensors under layer 0, without embedding and head, bit for bit."""
    report = run(source, tmp_path / "out", verify=True)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == [WEIGHTS]
    actual, expected = read_all(tmp_path / "out"), expected_tensors(source)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "bitwise", what=name)
    assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert report.tensors == len(expected)
    assert report.fp8_tensors == sum(tensor.dtype == torch.float8_e4m3fn for tensor in expected.values()) > 0
    assert report.verified
    with safe_open(tmp_path / "out" / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_config_and_index_have_the_known_layout(source: Path, tmp_path: Path) -> None:
    """config.json differs in two fields, keys sorted, indent 2; the index names every tensor and the size."""
    report = run(source, tmp_path / "out")
    before = json.loads((source / "config.json").read_text())
    text = (tmp_path / "out" / "config.json").read_text()
    after = json.loads(text)
    assert after == before | {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}
    assert text == json.dumps(after, indent=2, sort_keys=True) + "\n"
    assert "quantization_config" in after
    assert ModelConfig.from_dict(after).is_exported_draft
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.nbytes}
    assert index["weight_map"] == dict.fromkeys(expected_tensors(source), WEIGHTS)


def test_other_files_are_copied_and_weights_are_not(source: Path, tmp_path: Path) -> None:
    """Tokenizer, code and generation config come along; weights of any format and folders do not."""
    report = run(source, tmp_path / "out")
    own = {WEIGHTS, "config.json", "model.safetensors.index.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == own | OTHER_FILES.keys()
    assert all((tmp_path / "out" / name).read_text() == text for name, text in OTHER_FILES.items())
    assert report.copied_files == len(OTHER_FILES)


def test_links_are_followed(source: Path, tmp_path: Path) -> None:
    """A source made of symbolic links, as download caches are, gives files, not links."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    run(linked, tmp_path / "out", verify=True)
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("stored_as", ["bf16", "fp32"])
def test_a_layer_without_fp8_loses_its_quantization_config(
    source: Path, tmp_path: Path, stored_as: Any
) -> None:
    """Readers that trust quantization_config would look for scales that are not there."""
    write_random_checkpoint(small_config(), tmp_path / "model", stored_as=stored_as)
    config = small_config()
    assert "quantization_config" in config
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    report = run(tmp_path / "model", tmp_path / "out", verify=True)
    assert not report.kept_quantization
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_only_shards_that_hold_the_layer_are_opened(source: Path, tmp_path: Path) -> None:
    """A directory with the layer's shards alone can be exported: the others may be absent or broken."""
    partial = tmp_path / "partial"
    shutil.copytree(source, partial)
    needed = shards_with_layer(source)
    for number, file in enumerate(sorted(partial.glob("*.safetensors"))):
        if file.name not in needed and number % 2:
            file.unlink()
        elif file.name not in needed:
            file.write_bytes(b"")
    assert len(list(partial.glob("*.safetensors"))) < len(list(source.glob("*.safetensors")))
    run(partial, tmp_path / "out", verify=True)
    assert read_all(tmp_path / "out").keys() == expected_tensors(source).keys()


def test_full_size_layer_has_the_published_size() -> None:
    """For the 671B configuration the official format gives the figures known for it, and for its layer."""
    config = json.loads((Path(__file__).parent.parent / "data" / "dsv3-full.json").read_text())
    plan = plan_checkpoint(ModelConfig.from_dict(config), "fp8")
    tensors = {name: tensor for _, group in plan for name, tensor in group.items()}
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors.values())) == (91_991, 688_574_839_360)
    left_out = ("model.layers.61.embed_tokens.weight", "model.layers.61.shared_head.head.weight")
    layer = [t for name, t in tensors.items() if name.startswith("model.layers.61.") and name not in left_out]
    assert (len(layer), sum(tensor.nbytes for tensor in layer)) == (1562, 11_717_511_392)


FAULTS = {
    "missing": (
        lambda t: [t.pop(PREFIX + name) for name in ("enorm.weight", "mlp.gate.weight")],
        r"missing \(2\): model\.layers\.2\.enorm\.weight, model\.layers\.2\.mlp\.gate\.weight",
    ),
    "no scale": (
        lambda t: t.pop(PREFIX + "self_attn.o_proj.weight_scale_inv"),
        r"FP8 without a scale \(1\): model\.layers\.2\.self_attn\.o_proj",
    ),
    "left over": (
        lambda t: t.update({PREFIX + "extra.weight": torch.zeros(1)}),
        r"left over \(1\): model\.layers\.2\.extra\.weight",
    ),
    "no layer": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(PREFIX)],
        r"announces a NextN layer but holds no tensor named model\.layers\.2\.\*",
    ),
    "shape": (
        lambda t: t.update({PREFIX + "hnorm.weight": torch.ones(3)}),
        r"hnorm\.weight is \[3\] instead of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unfit_layer_is_refused_and_nothing_is_written(source: Path, tmp_path: Path, fault: str) -> None:
    """The exported set must be what the NextN module reads; else tensors are named and no file appears."""
    change, message = FAULTS[fault]
    bad = rewrite(source, tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=message):
        run(bad, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["bad"]


def test_models_without_a_layer_and_exports_are_refused(source: Path, tmp_path: Path) -> None:
    """There is nothing to export from a plain model, nor from an exported layer."""
    plain = write(
        tmp_path / "plain", {"a": torch.zeros(1)}, json.dumps(small_config(num_nextn_predict_layers=0))
    )
    with pytest.raises(CheckpointError, match="no NextN layer to export"):
        run(plain, tmp_path / "out")
    run(source, tmp_path / "once")
    with pytest.raises(CheckpointError, match="an exported NextN layer already"):
        run(tmp_path / "once", tmp_path / "twice")


def test_an_output_that_holds_something_is_kept(source: Path, tmp_path: Path) -> None:
    """A filled directory is refused; --force replaces an earlier export whole, and nothing else."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; --force"):
        run(source, out)
    with pytest.raises(CheckpointError, match="is not an earlier export"):
        run(source, out, force=True)
    assert (out / "diary.txt").read_text() == "mine"
    (out / "diary.txt").unlink()
    run(source, out)  # an empty directory is welcome
    (out / "stale.txt").write_text("old")
    with pytest.raises(CheckpointError, match="is not empty"):
        run(source, out)
    run(source, out, force=True)
    assert not (out / "stale.txt").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"):
        run(source, tmp_path / "file")


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_output_and_input_do_not_contain_each_other(source: Path, where: str) -> None:
    """Writing into, onto or around the source is refused."""
    with pytest.raises(CheckpointError, match="must lie outside"):
        run(source, source / where, force=True)


def test_a_failed_write_leaves_the_earlier_export(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle: the error is a sentence, and what was there before still is."""
    out = tmp_path / "out"
    run(source, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "copy_tensors", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
        run(source, out, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_verify_finds_a_flipped_bit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changed on its way to the disk fails the export."""
    copy = export.copy_tensors

    def flip(file: Path, *args: Any) -> None:
        copy(file, *args)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(export, "copy_tensors", flip)
    with pytest.raises(CheckpointError, match=r"differs from model\.layers\.2\..* in .*\.safetensors"):
        run(source, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()


def test_written_tensors_are_aligned_to_their_items(tmp_path: Path) -> None:
    """Odd sizes of narrow dtypes do not push wider ones off their own item size, and names may change."""
    tensors = {
        "a": torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn),
        "b": torch.tensor([4.0]).bfloat16(),
        "c": torch.tensor([5.0]),
        "d": torch.zeros(0, dtype=torch.float64),
    }
    source = Checkpoint(write(tmp_path / "source", tensors))
    copy_tensors(tmp_path / "copy.safetensors", {f"x.{name}": source.find(name) for name in tensors})
    written = load_file(tmp_path / "copy.safetensors")
    assert written.keys() == {f"x.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert_close(written[f"x.{name}"], tensor, "bitwise", what=name)
    for tensor in read_header(tmp_path / "copy.safetensors").values():
        assert tensor.begin % {"F64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1}[tensor.dtype] == 0


def test_a_failed_replacement_puts_the_earlier_export_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the new directory cannot take its place after the old one has left it, the old one returns."""
    out = tmp_path / "out"
    run(source, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Device or resource busy"):
        run(source, out, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_command_prints_a_summary_or_one_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 with figures, or 1 with a sentence on stderr and no traceback."""
    arguments = ["--input-dir", str(source), "--output-dir", str(tmp_path / "out"), "--verify"]
    assert main(arguments) == 0
    assert "tensors (" in (out := capsys.readouterr().out)
    assert "verified byte for byte" in out
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("nextn-export: ")
    assert error.count("\n") == 1
    assert main(["--input-dir", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "x")]) == 1
    assert "config.json does not exist" in capsys.readouterr().err


def test_command_offers_only_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """A conversion that cannot be written yet is an unknown flag."""
    with pytest.raises(SystemExit) as caught:
        main(["--input-dir", "a", "--output-dir", "b", "--dtype", "bf16"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --dtype bf16" in capsys.readouterr().err


def test_written_directories_follow_the_umask(source: Path, tmp_path: Path) -> None:
    """The output is as readable as any directory that this user makes."""
    run(source, tmp_path / "out")
    (tmp_path / "other").mkdir()
    mode = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode
