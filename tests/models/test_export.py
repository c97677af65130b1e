"""Export: the NextN layer alone, as stored or converted, complete or not at all, every refusal a sentence.

A run that was cut off anywhere is gone on with, and ends in the same bytes as one that was not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.models import checkpoint, export, output
from nextn.models.checkpoint import INDEX_NAME, Checkpoint, StoredTensor, write_index
from nextn.models.convert import convert_checkpoint
from nextn.models.export import export_nextn, find_nextn, main
from nextn.models.fp8 import quantize_blocks
from nextn.models.output import RECORDS
from nextn.models.progress import Progress
from nextn.models.random_checkpoint import StoredAs, plan_checkpoint, write_random_checkpoint
from tests.compare import assert_close
from tests.models.checkpoints import (  # noqa: F401 - small_readers serves by being here
    DATA,
    OTHER_FILES,
    Tensors,
    read_all,
    reference,
    rewrite,
    small_config,
    small_readers,
    snapshot,
    write,
)  # fmt: skip
from tests.models.test_families import build, states, with_e8m0_bytes, with_mixed_dtypes
from tests.models.test_loader import opened_files, rss

WEIGHTS = "nextn_layer_parameters.safetensors"
RECORD = RECORDS["nextn-export"]
PREFIX = "model.layers.2."
DRAFT = "model.layers.0."
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint with NextN in shards, among other files."""
    path = tmp_path_factory.mktemp("checkpoints") / "source"
    write_random_checkpoint(small_config(), path, shard_size=400_000)
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
        DRAFT + name.removeprefix(PREFIX): tensor
        for name, tensor in read_all(source).items()
        if name.startswith(PREFIX) and name not in left_out
    }


def shards_with_layer(source: Path) -> set[str]:
    """The shards that hold what is exported; copies of embedding and head may fill others."""
    table = json.loads((source / INDEX_NAME).read_text())["weight_map"]
    return {table[PREFIX + name.removeprefix(DRAFT)] for name in expected_tensors(source)}


def test_exported_tensors_are_the_layers_bytes(source: Path, tmp_path: Path) -> None:
    """One file holds exactly the layer's tensors under layer 0, without embedding and head, bit for bit."""
    report = run(source, tmp_path / "out", verify=True)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == [WEIGHTS]
    actual, expected = read_all(tmp_path / "out"), expected_tensors(source)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "bitwise", what=name)
    assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert (report.tensors, report.converted) == (len(expected), 0)
    assert report.shards == len(shards_with_layer(source))
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
    own = {WEIGHTS, RECORD, "config.json", "model.safetensors.index.json"}
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


# Conversions


LINEAR = ("_proj.weight", "kv_a_proj_with_mqa.weight")


def by_hand(stored: Tensors, dtype: str) -> Tensors:
    """What an export of these tensors must hold, computed block by block, the plainest way there is."""
    if dtype == "keep":
        return stored
    made: Tensors = {}
    for name in [name for name in stored if not name.endswith("_scale_inv")]:
        tensor = stored[name]
        if name.endswith("e_score_correction_bias") or (dtype == "fp8" and f"{name}_scale_inv" in stored):
            made |= {kept: stored[kept] for kept in (name, f"{name}_scale_inv") if kept in stored}
        elif dtype == "fp8" and name.endswith(LINEAR) and "eh_proj" not in name:
            made[name], made[f"{name}_scale_inv"] = quantized(tensor.float())
        else:
            made[name] = reference(stored, name).bfloat16()
    return made


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and scales, one block of 128 x 128 after another."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.ones(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            scale[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
    return codes, scale


SOURCES: dict[str, tuple[StoredAs, Callable[[Tensors], None] | None]] = {
    "fp8": ("fp8", None),
    "bf16": ("bf16", None),
    "fp32": ("fp32", None),
    "mixed": ("fp8", with_mixed_dtypes),
    "exponents": ("fp8", with_e8m0_bytes),
}


@pytest.fixture(scope="module", params=SOURCES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind; its config.json speaks of FP8 and powers of two whatever the kind."""
    stored_as, change = SOURCES[request.param]
    path: Path = tmp_path_factory.mktemp("stored")
    write_random_checkpoint(small_config(), path / "plain", stored_as=stored_as)
    made = rewrite(path / "plain", path / "made", change) if change else path / "plain"
    config = small_config()
    config["quantization_config"] |= {"scale_fmt": "ue8m0"}
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp8"])
def test_any_layer_is_exported_in_any_dtype(stored: Path, tmp_path: Path, dtype: Any) -> None:
    """Every value as computed by hand, bit for bit; config.json says what is there; it loads and drafts."""
    report = run(stored, tmp_path / "out", dtype=dtype, verify=True)
    actual, expected = read_all(tmp_path / "out"), by_hand(expected_tensors(stored), dtype)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "bitwise", what=name)
    before = expected_tensors(stored)
    weights = [name for name in before if not name.endswith("_scale_inv")]
    assert report.converted == sum(actual[name].dtype != before[name].dtype for name in weights)
    assert report.fp8_tensors == sum(tensor.dtype == torch.float8_e4m3fn for tensor in actual.values())

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (report.fp8_tensors > 0)
    anew = dtype == "fp8" and any(name not in before for name in actual)
    assert ("scale_fmt" in config.get("quantization_config", {})) == (report.fp8_tensors > 0 and not anew)
    assert dtype == "keep" or config["torch_dtype"] == "bfloat16"
    own, drafted = states(build(stored))[1], states(build(stored, tmp_path / "out"))[1]
    assert own is not None
    assert drafted is not None
    if report.converted == 0:
        assert_close(drafted, own, "bitwise")
    else:
        assert (drafted - own).square().mean() < 0.1**2 * own.square().mean()


def test_a_dtype_that_the_layer_has_changes_no_byte(source: Path, tmp_path: Path) -> None:
    """FP8 from FP8 is a copy: weights, scales, config.json and index."""
    run(source, tmp_path / "keep")
    run(source, tmp_path / "fp8", dtype="fp8")
    changed = dict(snapshot(tmp_path / "fp8").items() ^ snapshot(tmp_path / "keep").items())
    assert changed.keys() == {RECORD}


@pytest.mark.parametrize("dtype", ["keep", "fp8", "bf16"])
def test_an_eh_proj_in_fp8_becomes_bf16(source: Path, tmp_path: Path, dtype: Any) -> None:
    """As in official checkpoints: SGLang and vLLM have no place for its scale. Nothing else is different."""
    name = PREFIX + "eh_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name], (128, 128))

    model = rewrite(source, tmp_path / "model", change)
    report = run(model, tmp_path / "out", dtype=dtype, verify=True)
    plain = run(source, tmp_path / "plain", dtype=dtype)
    assert report.converted == plain.converted + 1
    assert report.tensors == plain.tensors
    found, expected = read_all(tmp_path / "out"), read_all(tmp_path / "plain")
    expected[DRAFT + "eh_proj.weight"] = reference(read_all(model), name).bfloat16()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(found[key], tensor, "bitwise", what=key)
    for file in ("config.json", INDEX_NAME):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_lists_of_plain_modules_speak_of_the_drafts_layer(source: Path, tmp_path: Path) -> None:
    """Names of the NextN layer become those of layer 0; the target's layer 0 is not the draft's."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    config = small_config()
    names = ["lm_head", "model.layers.0.self_attn.o_proj", PREFIX + "eh_proj", "model.layers.20.mlp"]
    config["quantization_config"] |= {"modules_to_not_convert": names, "ignored_layers": []}
    (model / "config.json").write_text(json.dumps(config))
    run(model, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert after["modules_to_not_convert"] == ["lm_head", DRAFT + "eh_proj"]
    assert after["ignored_layers"] == []


def test_the_layers_count_has_the_name_that_readers_ask_for(source: Path, tmp_path: Path) -> None:
    """transformers writes num_mtp_layers; SGLang asks for num_nextn_predict_layers."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    config = small_config(num_mtp_layers=1)
    del config["num_nextn_predict_layers"]
    (model / "config.json").write_text(json.dumps(config))
    run(model, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (after["num_nextn_predict_layers"], after["num_mtp_layers"]) == (1, 1)


# Values that no draft can compute with


def set_value(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensor = tensors[PREFIX + name]
        tensor.view(-1)[-1] = torch.tensor(value).to(tensor.dtype)

    return change


DAMAGES: dict[str, tuple[StoredAs, str, float]] = {
    "a NaN code": ("fp8", "mlp.experts.3.down_proj.weight", float("nan")),
    "an infinite scale": ("fp8", "self_attn.o_proj.weight_scale_inv", float("inf")),
    "a NaN scale": ("fp8", "self_attn.q_a_proj.weight_scale_inv", float("nan")),
    "a NaN norm": ("bf16", "shared_head.norm.weight", float("nan")),
    "an infinite weight": ("bf16", "mlp.shared_experts.up_proj.weight", float("-inf")),
    "a NaN bias": ("fp32", "mlp.gate.e_score_correction_bias", float("nan")),
    "a NaN weight": ("fp32", "self_attn.kv_b_proj.weight", float("nan")),
}


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp8"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_values_that_are_not_finite_are_damage(tmp_path: Path, damage: str, dtype: Any) -> None:
    """Whether it is copied or converted, the tensor is named, and no draft appears."""
    stored_as, name, value = DAMAGES[damage]
    write_random_checkpoint(small_config(), tmp_path / "model", stored_as=stored_as)
    bad = rewrite(tmp_path / "model", tmp_path / "bad", set_value(name, value))
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors.*{name.removesuffix('_scale_inv')}.*not finite"
    ):
        run(bad, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_value_beyond_bf16_is_not_written_as_infinity(source: Path, tmp_path: Path) -> None:
    """FP8 codes times an absurd scale are finite where they lie; in bf16 they would not be."""
    name = "mlp.experts.0.up_proj.weight_scale_inv"
    bad = rewrite(source, tmp_path / "bad", set_value(name, 3e38))
    run(bad, tmp_path / "kept")
    with pytest.raises(CheckpointError, match="not finite"):
        run(bad, tmp_path / "out", dtype="bf16")


# Which files are read, and how much memory that takes


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
    with opened_files() as opened:
        run(partial, tmp_path / "out", verify=True)
    assert set(opened) - {WEIGHTS, f"{WEIGHTS}.part"} == needed
    assert read_all(tmp_path / "out").keys() == expected_tensors(source).keys()


def test_no_file_stays_open(source: Path, tmp_path: Path) -> None:
    """After an export, and after one that failed, the process has the descriptors that it had."""
    before = set(os.listdir("/proc/self/fd"))
    for dtype in ("keep", "bf16"):
        run(source, tmp_path / dtype, dtype=dtype, verify=True)
        with pytest.raises(CheckpointError, match="is not empty"):
            run(source, tmp_path / dtype, dtype=dtype)
    assert set(os.listdir("/proc/self/fd")) == before


def sparse_layer(path: Path, config: dict[str, Any], stored_as: StoredAs) -> Path:
    """A checkpoint whose NextN layer is zeros that take no room on the disk; other shards are absent."""
    tensors = [
        pair
        for _, group in plan_checkpoint(ModelConfig.from_dict(config), stored_as)
        for pair in group.items()
    ]
    prefix = f"model.layers.{config['num_hidden_layers']}."
    codes = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
    table, offset = {}, 0
    for name, tensor in tensors:
        if name.startswith(prefix):
            place = [offset, offset + tensor.nbytes]
            table[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            offset += tensor.nbytes
    header = json.dumps(table).encode()
    path.mkdir()
    with (path / "model-00002-of-00002.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + offset)
    files = {name: f"model-0000{1 + name.startswith(prefix)}-of-00002.safetensors" for name, _ in tensors}
    write_index(path, files, sum(tensor.nbytes for _, tensor in tensors))
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("stored_as", "dtype"), [("fp8", "keep"), ("fp8", "bf16"), ("bf16", "fp8")])
def test_memory_does_not_grow_with_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_as: StoredAs, dtype: Any
) -> None:
    """Measured at every piece: far less than the layer, and no more than its largest weight in float32."""
    wide = {"hidden_size": 1024, "moe_intermediate_size": 32768, "n_routed_experts": 2, "n_group": 1}
    config = small_config(**wide | {"num_experts_per_tok": 1})
    path = sparse_layer(tmp_path / "model", config, stored_as)
    run(sparse_layer(tmp_path / "warm", small_config(), stored_as), tmp_path / "first", dtype=dtype)
    before, peak = rss(), 0

    def measure(meter: Progress, nbytes: int) -> None:
        nonlocal peak
        peak = max(peak, rss() - before)

    monkeypatch.setattr(Progress, "advance", measure)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    report = run(path, tmp_path / "out", dtype=dtype)
    assert report.nbytes > 290 * MIB
    assert peak < 128 * MIB == 4 * 32768 * 1024


def test_full_size_layer_has_the_published_size() -> None:
    """For the 671B configuration the official format gives the figures known for it, and for its layer."""
    config = json.loads((DATA / "dsv3-full.json").read_text())
    plan = plan_checkpoint(ModelConfig.from_dict(config), "fp8")
    tensors = {name: tensor for _, group in plan for name, tensor in group.items()}
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors.values())) == (91_991, 688_574_839_360)
    left_out = ("model.layers.61.embed_tokens.weight", "model.layers.61.shared_head.head.weight")
    layer = [t for name, t in tensors.items() if name.startswith("model.layers.61.") and name not in left_out]
    assert (len(layer), sum(tensor.nbytes for tensor in layer)) == (1562, 11_717_511_392)


@pytest.mark.parametrize("stored_as", ["fp8", "bf16"])
def test_full_size_exports_have_the_known_sizes(tmp_path: Path, stored_as: StoredAs) -> None:
    """Tensors and bytes of a draft of DeepSeek-V3, planned from a header of full size."""
    fp8, plain = (1562, 11_717_511_392), (786, 23_220_136_960)
    config = json.loads((DATA / "dsv3-full.json").read_text())
    path = sparse_layer(tmp_path / "model", config, stored_as)
    cfg = ModelConfig.from_dir(path)
    items = find_nextn(Checkpoint(path), cfg)
    known: dict[Any, tuple[int, int]] = {
        "keep": fp8 if stored_as == "fp8" else plain,
        "fp8": fp8,
        "bf16": plain,
    }
    for dtype, figures in known.items():
        tensors = [tensor for item in items for tensor in export._layer_tensors(item, cfg, dtype)]
        assert (len(tensors), sum(tensor.nbytes for tensor in tensors)) == figures


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


def test_only_an_earlier_export_is_replaced(source: Path, tmp_path: Path) -> None:
    """A folder is no export because a file in it has a draft's name; --force replaces what has the record."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    (out / WEIGHTS).write_bytes(b"")
    for record in (None, "", "[]", '{"source": "x"}'):
        if record is not None:
            (out / RECORD).write_text(record)
        before = snapshot(out)
        with pytest.raises(CheckpointError, match="is not an earlier output"):
            run(source, out, force=True)
        assert snapshot(out) == before
    shutil.rmtree(out)
    run(source, out)
    assert json.loads((out / RECORD).read_text()) == {"source": "source", "stored_as": "keep"}
    (out / "stale.txt").write_text("old")
    with pytest.raises(CheckpointError, match="is not empty; --force"):
        run(source, out)
    run(source, out, force=True)
    assert not (out / "stale.txt").exists()
    with pytest.raises(CheckpointError, match="must lie outside"):
        run(source, source / "inside", force=True)


def test_a_draft_of_a_converted_checkpoint_is_no_conversion(source: Path, tmp_path: Path) -> None:
    """Records are not copied, so that neither command replaces what the other one wrote."""
    convert_checkpoint(source, tmp_path / "converted", "bf16", progress=False)
    run(tmp_path / "converted", tmp_path / "out")
    assert (tmp_path / "converted" / RECORDS["nextn-convert"]).exists()
    assert not (tmp_path / "out" / RECORDS["nextn-convert"]).exists()
    with pytest.raises(CheckpointError, match="is not an earlier output"):
        convert_checkpoint(source, tmp_path / "out", "bf16", force=True, progress=False)


def test_a_failed_write_leaves_the_earlier_export(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle: the error is a sentence, and what was there before still is."""
    out = tmp_path / "out"
    run(source, out)
    before = snapshot(out)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", full)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device.* are free"):
            run(source, out, force=True)
    assert snapshot(out) == before
    run(source, out, force=True, verify=True)
    assert snapshot(out) == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_verify_finds_a_flipped_bit_and_nobody_goes_on_with_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that changed on its way to the disk fails the export; the next run writes the file anew."""
    write = output.write_files

    def flip(staging: Path, *args: Any) -> None:
        write(staging, *args)
        data = bytearray((staging / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (staging / WEIGHTS).write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_files", flip)
        with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: model\.layers\.0\..* differs"):
            run(source, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out")
    run(source, tmp_path / "again")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "again")


# Runs that are cut off


class Cut(BaseException):
    """Stands for whatever ends a run: nobody catches it."""


def cut_after_bytes(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """End the run when so many bytes of tensors have been written."""
    seen = 0

    def advance(meter: Progress, count: int) -> None:
        nonlocal seen
        seen += count
        if seen > nbytes:
            raise Cut

    patch.setattr(Progress, "advance", advance)


def cut_at(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """End the run where it would call one of the steps."""

    def step(*args: Any, **options: Any) -> Any:
        raise Cut

    return lambda patch: patch.setattr(output, name, step)


CUTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], float]] = {
    "at the first byte": (lambda patch: cut_after_bytes(patch, 0), 0.0),
    "within the weights": (lambda patch: cut_after_bytes(patch, 1_000_000), 0.5),
    "before the other files": (cut_at("copy_files"), 0.0),
    "before config.json": (cut_at("write_description"), 1.0),
    "before the comparison": (cut_at("verify_files"), 1.0),
    "before the last look at the source": (cut_at("require_unchanged"), 1.0),
    "before it takes its place": (cut_at("_replace"), 1.0),
}  # fmt: skip


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of stored tensors in the order in which their bytes are copied."""
    names: list[str] = []
    chunks = StoredTensor.chunks

    def counted(tensor: StoredTensor, room: memoryview) -> Iterator[memoryview]:
        names.append(tensor.name)
        return chunks(tensor, room)

    monkeypatch.setattr(StoredTensor, "chunks", counted)
    return names


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_that_was_cut_off_is_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str], cut: str
) -> None:
    """Wherever it ended nothing stands in the output's place; what was written is not read again."""
    plant, least = CUTS[cut]
    monkeypatch.setattr(output, "_SYNC_BYTES", 1)
    monkeypatch.setattr(output, "default_threads", lambda: 1)  # so that no thread is far behind
    run(source, tmp_path / "whole")
    total = len(read)
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(Cut):
            run(source, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    read.clear()
    run(source, tmp_path / "out")
    assert len(read) <= (1 - least) * total
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"out", "whole"}


@pytest.mark.parametrize("other", ["dtype", "shard", "file", "config"])
def test_what_another_plan_wrote_is_not_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str], other: str
) -> None:
    """Another dtype, or a source that changed, a file beside the weights even: everything is written anew."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    monkeypatch.setattr(output, "_SYNC_BYTES", 1)
    with monkeypatch.context() as patch:
        cut_at("require_unchanged")(patch)
        with pytest.raises(Cut):
            run(model, tmp_path / "out", dtype="bf16" if other == "dtype" else "keep")
    if other == "shard":
        file = model / sorted(shards_with_layer(source))[0]
        data = bytearray(file.read_bytes())
        data[-2] ^= 1
        file.write_bytes(data)
    elif other == "file":
        (model / "tokenizer.json").unlink()
    elif other == "config":
        (model / "config.json").write_text(json.dumps(small_config(eos_token_id=7)))
    read.clear()
    run(model, tmp_path / "out", verify=True)
    run(model, tmp_path / "whole")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert read.count(PREFIX + "mlp.experts.1.up_proj.weight") == 3  # written, compared, and written again


def test_a_source_that_changes_meanwhile_is_not_exported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the old weights and half of the new ones are no layer."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    shard = model / sorted(shards_with_layer(source))[0]
    copy = output.copy_files

    def touch(*args: Any) -> None:
        os.utime(shard)
        copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(output, "copy_files", touch)
        with pytest.raises(
            CheckpointError, match=rf"changed while they were read: .*{shard.name}; run it again"
        ):
            run(model, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    run(model, tmp_path / "out", verify=True)


@pytest.mark.parametrize("kind", ["header", "index", "config"])
def test_a_source_that_changes_right_after_it_was_read_is_not_exported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What was read is older than the plan: offsets would be stale, and a comparison would agree."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    owner, name = {
        "header": (checkpoint, "read_header"),
        "index": (checkpoint, "_read_index"),
        "config": (output, "read_config"),
    }[kind]
    read, changed = getattr(owner, name), []

    def then_changed(file: Path) -> Any:
        result = read(file)
        if file.parent == model and not changed:
            file.write_bytes(file.read_bytes())
            changed.append(file.name)
        return result

    monkeypatch.setattr(owner, name, then_changed)
    with pytest.raises(CheckpointError, match="changed while they were read") as caught:
        run(model, tmp_path / "out", verify=True)
    assert changed[0] in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_file_that_cannot_be_read_is_named_before_weights_are_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is the source's, and known before hours of work."""
    plain, written = Path.open, []

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path == source / "tokenizer.json":
            raise PermissionError(13, "Permission denied")
        return plain(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Progress, "advance", lambda meter, nbytes: written.append(nbytes))
    with pytest.raises(CheckpointError, match=r"source/tokenizer\.json cannot be read: .*Permission denied"):
        run(source, tmp_path / "out")
    assert not written
    assert not list(tmp_path.iterdir())


def test_a_link_into_the_output_is_no_source(source: Path, tmp_path: Path) -> None:
    """What --force replaces would be what is read."""
    run(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "linked")
    (tmp_path / "linked" / "notes.txt").symlink_to(tmp_path / "out" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"out holds what is read: .*notes\.txt"):
        run(tmp_path / "linked", tmp_path / "out", force=True)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_seconds_are_those_of_writing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not counted in."""
    compared: list[bool] = []
    monkeypatch.setattr(output, "verify_files", lambda *args: compared.append(True))
    monkeypatch.setattr(Progress, "seconds", property(lambda meter: 100.0 if compared else 1.0))
    assert run(source, tmp_path / "out", verify=True).seconds == 1.0


def test_a_killed_command_is_gone_on_with(source: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of the weights: no output, and then the same command completes it."""
    code = (
        "import os, signal, sys\n"
        "from nextn.models import export\n"
        "from nextn.models.progress import Progress\n"
        "seen = []\n"
        "def advance(meter, count):\n"
        "    seen.append(count)\n"
        "    if len(seen) == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Progress.advance = advance\n"
        "sys.exit(export.main(sys.argv[1:]))\n"
    )
    arguments = ["--input-dir", str(source), "--output-dir", str(tmp_path / "out")]
    killed = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--verify"]) == 0
    run(source, tmp_path / "whole")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_source_that_cannot_be_read_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """The fault is the source's, and the sentence says so, although it came up while a file was written."""
    model, write = tmp_path / "model", output.write_files
    shutil.copytree(source, model)

    def without_source(*args: Any) -> None:
        shutil.rmtree(model)
        write(*args)

    monkeypatch.setattr(output, "write_files", without_source)
    with pytest.raises(CheckpointError, match=r"model-\S+\.safetensors cannot be read at model\.layers\.2\."):
        run(model, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


# The command


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


@pytest.mark.parametrize("dtype", ["int4", "BF16", ""])
def test_command_offers_only_what_it_does(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """Another dtype is a usage error."""
    with pytest.raises(SystemExit) as caught:
        main(["--input-dir", "a", "--output-dir", "b", "--dtype", dtype])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_the_summary_says_what_was_done(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors, FP8, bytes, shards, seconds, conversions, other files, config, comparison."""
    arguments = ["--input-dir", str(source), "--output-dir", str(tmp_path / "out"), "--dtype", "bf16"]
    assert main(arguments) == 0
    actual = read_all(tmp_path / "out")
    nbytes = sum(tensor.nbytes for tensor in actual.values())
    assert capsys.readouterr().out.startswith(
        f"{tmp_path / 'out'}: {len(actual)} tensors (0 FP8), {nbytes / 1e6:.2f} MB from "
        f"{len(shards_with_layer(source))} shards in "
    )
    assert main([*arguments, "--force", "--verify"]) == 0
    converted = sum(tensor.dtype == torch.float8_e4m3fn for tensor in expected_tensors(source).values())
    assert capsys.readouterr().out.endswith(
        f" s, {converted} weights converted, 3 other files, no quantization_config (nothing is FP8), "
        "verified byte for byte\n"
    )


def test_an_interrupt_is_no_success(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130, one line, no output."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupt)
    assert main(["--input-dir", str(source), "--output-dir", str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_written_directories_follow_the_umask(source: Path, tmp_path: Path) -> None:
    """The output is as readable as any directory that this user makes."""
    run(source, tmp_path / "out")
    (tmp_path / "other").mkdir()
    mode = stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode
