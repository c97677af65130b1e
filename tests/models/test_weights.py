"""Loading: every tensor of the model exactly once, as it is on disk, and each fault names its tensors."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels.comm import TensorParallel
from nextn.models import weights
from nextn.models.dummy import fill_dummy, random_fp8, weight_std
from nextn.models.export import export_nextn
from nextn.models.inputs import PrefillInput
from nextn.models.loader import LoadReport, load_checkpoint
from nextn.models.progress import Progress
from nextn.models.random_checkpoint import StoredAs, quantize_blocks, write_random_checkpoint
from nextn.models.weights import Models, build_models
from tests.compare import assert_close
from tests.models.checkpoints import (
    Tensors,
    capturing,
    read_all,
    reference,
    rewrite,
    small_config,
    specs_of,
    tiny_config,
    write,
)

CPU = torch.device("cpu")
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
Q_A = "model.layers.0.self_attn.q_a_proj.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
GATE = "model.layers.1.mlp.gate.weight"
NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint in the official format: two layers, NextN, several shards."""
    path = tmp_path_factory.mktemp("checkpoints") / "small"
    write_random_checkpoint(small_config(), path, shard_size=10**6)
    return path


def skip_copies(name: str) -> bool:
    return name in COPIES


def load(path: Path, skip: Callable[[str], bool] = skip_copies) -> dict[str, tuple[Tensor, Tensor | None]]:
    specs, got = capturing(specs_of(small_config()))
    load_checkpoint(path, specs, skip=skip, progress=False)
    return got


def build(path: Path | None, config: dict[str, Any] | None = None, **engine: Any) -> Models:
    cfg = ModelConfig.from_dict(config) if config else ModelConfig.from_dir(path or Path())
    keep_fp8 = engine.pop("keep_fp8", None)
    settings = EngineConfig(**engine)
    return build_models(path, cfg, settings, CPU, torch.float32, 64, keep_fp8=keep_fp8, progress=False)


def parameters(models: Models) -> Tensors:
    state = {f"target.{name}": value for name, value in models.target.state_dict().items()}
    if models.nextn is not None:
        state |= {f"nextn.{name}": value for name, value in models.nextn.state_dict().items()}
    return state


def assert_same_parameters(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "bitwise", what=name)


# What is loaded


@pytest.mark.parametrize("shard_size", [10**6, 10**9])
@pytest.mark.parametrize("stored_as", ["fp8", "bf16", "fp32"])
def test_every_tensor_arrives_once_as_it_is_stored(
    tmp_path: Path, stored_as: StoredAs, shard_size: int
) -> None:
    """One file or many, and whatever the dtype, a spec gets exactly the tensor (and scale) of its name."""
    path = tmp_path / "model"
    write_random_checkpoint(small_config(), path, stored_as=stored_as, shard_size=shard_size)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard_size == 10**6)
    stored, got = read_all(path), load(path)
    assert {name for name, (_, scale) in got.items() if scale is not None} == {
        name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")
    }
    for name, (weight, scale) in got.items():
        assert_close(weight, stored[name], "bitwise", what=name)
        if scale is not None:
            assert_close(scale, stored[f"{name}_scale_inv"], "bitwise", what=name)


def test_report_counts_what_was_read(small: Path) -> None:
    """The report's figures are those of the files."""
    specs, got = capturing(specs_of(small_config()))
    report = load_checkpoint(small, specs, skip=skip_copies, progress=False)
    fp8 = sum(scale is not None for _, scale in got.values())
    nbytes = sum(weight.nbytes for weight, _ in got.values())
    scales = sum(scale.nbytes for _, scale in got.values() if scale is not None)
    files = len(list(small.glob("*.safetensors")))
    assert report == LoadReport(len(specs), fp8, 2, nbytes, nbytes + scales, files, report.seconds)
    assert fp8 > 0


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_of_other_dtypes_are_converted(small: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """UE8M0 and bf16 scales arrive as the float32 numbers that they stand for."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith("_scale_inv"):
                tensors[name] = torch.exp2(tensors[name].log2().ceil()).to(dtype)

    path = rewrite(small, tmp_path / "model", change)
    stored, got = read_all(path), load(path)
    for name, (_, scale) in got.items():
        if scale is not None:
            assert_close(scale, stored[f"{name}_scale_inv"].float(), "bitwise", what=name)
            assert scale.min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_float_dtypes_are_handed_on(small: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """fp16 and fp64 tensors reach the module as stored; it casts them."""
    path = rewrite(small, tmp_path / "model", lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    assert_close(load(path)[NORM][0], read_all(path)[NORM], "bitwise")


def test_a_scale_may_lie_in_another_shard(small: Path, tmp_path: Path) -> None:
    """Weight and scale are found by name, each in the file that the index gives."""
    path = tmp_path / "model"
    tensors = read_all(small)
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    write(path, tensors)
    write(tmp_path / "scales", scales)
    (tmp_path / "scales" / "model.safetensors").rename(path / "scales.safetensors")
    files = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(scales, "scales.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    expected = load(small)
    for name, (_, scale) in load(path).items():
        wanted = expected[name][1]
        assert (scale is None) == (wanted is None)
        if scale is not None and wanted is not None:
            assert_close(scale, wanted, "bitwise", what=name)


def test_shards_without_an_index_are_read_by_their_headers(small: Path, tmp_path: Path) -> None:
    """Several files and no index: what each holds is in its header; the result is the same."""
    path = tmp_path / "model"
    shutil.copytree(small, path)
    remove_index(path)
    assert len(list(path.glob("*.safetensors"))) > 2
    expected = load(small)
    for name, (weight, scale) in load(path).items():
        assert_close(weight, expected[name][0], "bitwise", what=name)
        assert (scale is None) == (expected[name][1] is None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_part_of_every_tensor(small: Path, rank: int) -> None:
    """A shard, dequantised, is the slice of the whole tensor, also where it cuts through scale blocks."""
    specs, got = capturing(specs_of(small_config(), tp=TensorParallel(rank, 2)))
    load_checkpoint(small, specs, skip=skip_copies, progress=False)
    stored, plain = read_all(small), 0
    for spec in specs:
        weight, scale = got[spec.name]
        local = {"w": weight} if scale is None else {"w": weight, "w_scale_inv": scale}
        assert_close(
            reference(local, "w"), reference(stored, spec.name)[spec.shard], "bitwise", what=spec.name
        )
        plain += scale is None and f"{spec.name}_scale_inv" in stored
    assert plain > 0  # experts are 128 wide, so half of one cannot keep its scales


def test_ranges_that_fit_blocks_stay_fp8(tmp_path: Path) -> None:
    """A part made of whole blocks, or reaching the end, keeps its FP8 bytes and the matching scales."""
    weight, scale = quantize_blocks(torch.randn(320, 256), (128, 128))
    path = write(tmp_path / "model", {"w": weight, "w_scale_inv": scale})
    spec = replace(specs_of(small_config())[3], name="w", shape=(320, 256), kind="linear")
    for rows, whole in (((0, 128), True), ((128, 320), True), ((0, 192), False), ((64, 320), False)):
        specs, got = capturing([replace(spec, shard=(slice(*rows), slice(128, 256)))])
        load_checkpoint(path, specs, skip=lambda name: False, progress=False)
        part, part_scale = got["w"]
        expected = reference({"w": weight, "w_scale_inv": scale}, "w")[slice(*rows), 128:]
        if whole:
            assert part_scale is not None
            assert_close(part, weight[slice(*rows), 128:], "bitwise")
            part = reference({"w": part, "w_scale_inv": part_scale}, "w")
        assert (part_scale is not None) == whole
        assert_close(part.float(), expected, "bitwise", what=str(rows))


def test_modules_take_tensors_one_at_a_time_while_several_threads_read(small: Path) -> None:
    """`spec.load` is never entered twice at once, so that a module may reallocate itself."""
    specs, got = capturing(specs_of(small_config()))
    inside, threads = threading.Lock(), set()

    def guarded(take: Callable[[Tensor, Tensor | None], None]) -> Callable[[Tensor, Tensor | None], None]:
        def call(weight: Tensor, scale: Tensor | None) -> None:
            assert inside.acquire(blocking=False)
            threads.add(threading.get_ident())
            time.sleep(0.001)  # long enough for another reader to be ready
            take(weight, scale)
            inside.release()

        return call

    guarded_specs = [replace(spec, load=guarded(spec.load)) for spec in specs]
    load_checkpoint(small, guarded_specs, skip=skip_copies, progress=False, threads=4)
    assert len(got) == len(specs)
    assert len(threads) > 1


def test_an_error_in_a_module_ends_the_load(small: Path) -> None:
    """What a `load` raises reaches the caller as it is."""
    specs, _ = capturing(specs_of(small_config()))

    def fail(weight: Tensor, scale: Tensor | None) -> None:
        raise CheckpointError("no room")

    specs[5] = replace(specs[5], load=fail)
    with pytest.raises(CheckpointError, match="no room"):
        load_checkpoint(small, specs, skip=skip_copies, progress=False)


def test_progress_is_logged_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """The last line gives the amount, the share and the rate; a silent one gives nothing."""
    with caplog.at_level(logging.INFO, logger="nextn"):
        silent = Progress("loading x", 10, shown=False)
        silent.advance(10)
        silent.close()
        assert not caplog.messages
        meter = Progress("loading x", 2_000_000)
        meter.advance(1_000_000)
        meter.close()
    assert re.fullmatch(r"loading x: 1\.00 MB of 2\.00 MB \(50 %\), \d+\.\d\d GB/s", caplog.messages[-1])


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar grows with the share; the last line ends with a newline."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    meter = Progress("loading x", 2_000_000_000)
    meter.advance(500_000_000)
    meter.close()
    text = capsys.readouterr().err
    assert re.fullmatch(
        r"(\rloading x \[#{6} {18}\] 500\.00 MB of 2\.00 GB \(25 %\), \d+\.\d\d GB/s\x1b\[K){1,2}\n", text
    )


# Faults in tensors


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(
    name: str, change: Callable[[Tensor], Tensor], source: str | None = None
) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[source or name])})


FAULTS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "missing": (drop(NORM, EXPERT), rf"missing \(2\): .*{EXPERT}.*"),
    "left over": (
        put("model.layers.0.extra", torch.clone, NORM),
        r"left over \(1\): model\.layers\.0\.extra",
    ),
    "many": (
        lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(9)}),
        r"left over \(9\): extra\.\d, extra\.\d, extra\.\d, extra\.\d, extra\.\d and 4 more",
    ),
    "layer 20": (
        put("model.layers.20.embed_tokens.weight", torch.clone, NORM),
        r"left over \(1\): model\.layers\.20\.embed",
    ),
    "weight shape": (
        put(KV_A, lambda t: t[:-1]),
        rf"wrong shape \(1\): {KV_A} is \[79, 256\] instead of \[80, 256\]",
    ),
    "scale shape": (
        put(f"{KV_A}_scale_inv", lambda t: t[:, :1]),
        rf"wrong shape \(1\): {KV_A}_scale_inv is \[1, 1\] instead of \[1, 2\]",
    ),
    "no scale": (drop(f"{Q_A}_scale_inv"), rf"FP8 without a scale \(1\): {Q_A} \(no {Q_A}_scale_inv\)"),
    "scale alone": (put(Q_A, Tensor.bfloat16), rf"scale of a weight that is not FP8 \(1\): {Q_A}_scale_inv"),
    "scale of nothing": (put(f"{NORM}_scale_inv", torch.clone, NORM), rf"left over \(1\): {NORM}_scale_inv"),
    "weight dtype": (
        put(Q_A, lambda t: t.view(torch.uint8)),
        rf"wrong dtype, not one of F8_E4M3, BF16, F16, F32, F64 \(1\): {Q_A} is U8",
    ),
    "other fp8": (put(Q_A, lambda t: t.view(torch.float8_e5m2)), rf"{Q_A} is F8_E5M2"),
    "scale dtype": (put(f"{Q_A}_scale_inv", Tensor.half), rf"wrong dtype.*: {Q_A}_scale_inv is F16"),
    "fp8 gate": (
        put(GATE, lambda t: t.to(torch.float8_e4m3fn)),
        rf"FP8 where a checkpoint never has it \(1\): {GATE} \(gate\)",
    ),
    "fp8 norm": (put(NORM, lambda t: t.to(torch.float8_e4m3fn)), rf"never has it \(1\): {NORM} \(norm\)"),
    "fp8 head": (
        put("lm_head.weight", lambda t: t.to(torch.float8_e4m3fn)),
        r"never has it \(1\): lm_head.weight",
    ),
    "infinite scale": (
        put(f"{Q_A}_scale_inv", lambda t: t.fill_(float("inf"))),
        rf"model\.safetensors is corrupt: {Q_A}_scale_inv is not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_fault_is_named(small: Path, tmp_path: Path, fault: str) -> None:
    """Each way in which a checkpoint can fail to fit the model is an error that names the tensor."""
    change, message = FAULTS[fault]
    path = rewrite(small, tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_all_faults_are_reported_at_once(small: Path, tmp_path: Path) -> None:
    """Several kinds of faults make one error, so that a person repairs them in one go."""

    def change(tensors: Tensors) -> None:
        drop(NORM, f"{Q_A}_scale_inv")(tensors)
        tensors["extra"] = torch.zeros(1)

    with pytest.raises(CheckpointError, match=r"missing \(1\).*left over \(1\).*FP8 without a scale \(1\)"):
        load(rewrite(small, tmp_path / "model", change))


def test_names_to_skip_may_be_there(small: Path, tmp_path: Path) -> None:
    """A name that `skip` accepts is neither loaded nor an error; rotary frequencies are always accepted."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    path = rewrite(small, tmp_path / "model", change)
    with pytest.raises(CheckpointError, match="inv_freq"):
        load(path)
    load(path, skip=lambda name: name in COPIES or weights.is_ignored(name))
    assert build(path).nextn is not None


# Faults in files


def index_of(path: Path) -> dict[str, str]:
    table: dict[str, str] = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return table


def set_index(path: Path, table: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(table))


def last_shard(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[-1]


def remove_index(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()


def lose_a_shard_and_the_index(path: Path) -> None:
    remove_index(path)
    remove_shard(path)


def copy_a_shard_without_index(path: Path) -> None:
    remove_index(path)
    shutil.copyfile(last_shard(path), path / "consolidated.safetensors")


def remove_shard(path: Path) -> None:
    last_shard(path).unlink()


def truncate(path: Path) -> None:
    os.truncate(last_shard(path), last_shard(path).stat().st_size - 100)


def empty(path: Path) -> None:
    last_shard(path).write_bytes(b"")


def garbage(path: Path) -> None:
    last_shard(path).write_bytes((64).to_bytes(8, "little") + b"\xff" * 200)


def huge_header(path: Path) -> None:
    last_shard(path).write_bytes((1 << 60).to_bytes(8, "little") + b"{}" * 50)


def bad_offsets(path: Path) -> None:
    data = last_shard(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = max(
        (name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"]
    )
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin - 128, end - 128]
    text = json.dumps(header).encode()
    last_shard(path).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_header(path: Path, change: Callable[[str], str]) -> None:
    """Replace the last shard's header text, and nothing else."""
    data = last_shard(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode()).encode()
    last_shard(path).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def name_twice(path: Path) -> None:
    def change(text: str) -> str:
        name, entry = next(item for item in json.loads(text).items() if item[0] != "__metadata__")
        return text.replace("{", f"{{{json.dumps(name)}: {json.dumps(entry)},", 1)

    edit_header(path, change)


def lfs_pointer(path: Path) -> None:
    last_shard(path).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4300000000\n"
    )


def wrong_size(path: Path) -> None:
    data = last_shard(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [3, *header[name]["shape"]]
    text = json.dumps(header).encode()
    last_shard(path).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def lost_tensor(path: Path) -> None:
    table = index_of(path)
    table[Q_A] = next(file for file in table.values() if file != table[Q_A])
    set_index(path, {"weight_map": table})


def unlisted_tensor(path: Path) -> None:

    file = last_shard(path)
    save_file(load_file(file) | {"surprise": torch.zeros(1)}, file)


FILE_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "neither index nor all shards": (
        lose_a_shard_and_the_index,
        r"lacks 1 of \d+ shards and has no model\.safetensors\.index\.json",
    ),
    "no index and a second copy": (
        copy_a_shard_without_index,
        r"no index, and tensors are stored twice \(\d+\): .*\(consolidated\.safetensors and model-.*keep one",
    ),
    "lfs pointer": (lfs_pointer, r"is a Git LFS pointer and not the file itself; run `git lfs pull`"),
    "name twice": (name_twice, r"has a corrupt header: names that stand twice: "),
    "fractional offsets": (
        lambda path: edit_header(
            path, lambda text: text.replace('"data_offsets":[0,', '"data_offsets":[0.0,')
        ),
        r"has a corrupt header: ValueError\(.* has shape \[.*\] at 0\.0 to",
    ),
    "deep header": (
        lambda path: edit_header(path, lambda text: "[" * 100_000),
        r"has a corrupt header: .*recursion",
    ),
    "index names twice": (
        lambda path: (
            (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
            )
            and None
        ),
        r"index\.json cannot be read: names that stand twice: a",
    ),
    "no shard": (remove_shard, r"names files that do not exist: model-\d+-of-\d+\.safetensors"),
    "truncated": (truncate, r"model-\d+-of-\d+\.safetensors is truncated or damaged"),
    "empty": (empty, r"model-\d+-of-\d+\.safetensors is truncated or not a safetensors file \(0 bytes\)"),
    "garbage": (garbage, r"model-\d+-of-\d+\.safetensors has a corrupt header"),
    "huge header": (huge_header, r"is truncated or not a safetensors file"),
    "bad offsets": (bad_offsets, r"has a corrupt header: a gap or an overlap before"),
    "wrong size": (wrong_size, r"has a corrupt header: ValueError\(.* bytes for"),
    "lost tensor": (
        lost_tensor,
        rf"in the index but not in its file \(1\): {Q_A} .*stored twice \(1\): {Q_A}",
    ),
    "unlisted tensor": (unlisted_tensor, r"in a file but not in the index \(1\): surprise \(model-"),
    "broken index": (
        lambda path: (path / "model.safetensors.index.json").write_text("{") and None,
        r"index\.json cannot be read",
    ),
    "no weight_map": (lambda path: set_index(path, {"metadata": {}}), r"lacks a weight_map"),
    "outside": (
        lambda path: set_index(path, {"weight_map": {"a": "../x.safetensors"}}),
        "outside its own directory",
    ),
    "two indices": (
        lambda path: (path / "other.safetensors.index.json").write_text("{}") and None,
        r"holds 2 indices",
    ),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_file_fault_is_named(small: Path, tmp_path: Path, fault: str) -> None:
    """A missing, cut or corrupt file is an error that names the file."""
    damage, message = FILE_FAULTS[fault]
    path = tmp_path / "model"
    shutil.copytree(small, path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_directory_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    """Other formats are refused by name; a path that is no directory too."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file \(it holds pytorch_model\.bin"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(tmp_path / "absent")


# Models


def test_fp8_dequantised_at_load_equals_a_dequantised_checkpoint(small: Path, tmp_path: Path) -> None:
    """The whole model in float32 is bit for bit the one loaded from dequantised float32 tensors."""

    def change(tensors: Tensors) -> None:
        plain = {name: reference(tensors, name) for name in tensors if not name.endswith("_scale_inv")}
        tensors.clear()
        tensors.update(plain)

    plain = build(rewrite(small, tmp_path / "plain", change))
    assert_same_parameters(parameters(build(small)), parameters(plain))
    assert all(value.isfinite().all() for value in parameters(plain).values())


def test_fp8_kept_computes_what_dequantised_weights_compute(small: Path) -> None:
    """Both ways of holding FP8 weights give the same hidden states and the same draft states."""
    results = []
    for keep_fp8 in (False, True):
        models = build(small, keep_fp8=keep_fp8)
        dtypes = {value.dtype for value in parameters(models).values()}
        assert (torch.float8_e4m3fn in dtypes) == keep_fp8
        assert models.nextn is not None
        tokens = torch.arange(5)
        inp = PrefillInput(tokens, tokens, tokens, torch.zeros(1, 1, dtype=torch.int64), (0, 5), (0,))
        cache = torch.zeros(3, 1, 8, models.cfg.latent_dim)
        hidden = models.target.prefill(inp, cache).hidden
        results.append((hidden, models.nextn.prefill(inp, models.target.final_norm(hidden), cache).hidden))
    for dequantised, kept in zip(*results, strict=True):
        assert_close(kept, dequantised, "fp32-logits")
        assert dequantised.std() > 0.1


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_mixed_checkpoints_load(small: Path, tmp_path: Path, keep_fp8: bool) -> None:
    """A bf16 NextN layer beside an FP8 target, and single bf16 experts, give the same model."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if f"{name}_scale_inv" in tensors and (
                name.startswith("model.layers.2.") or name in (EXPERT, KV_A)
            ):
                tensors[name] = reference(tensors, name)
                del tensors[f"{name}_scale_inv"]

    mixed = build(rewrite(small, tmp_path / "mixed", change), keep_fp8=keep_fp8)
    dtypes = {name: value.dtype for name, value in parameters(mixed).items()}
    assert (torch.float8_e4m3fn in dtypes.values()) == keep_fp8
    assert not any(
        dtype == torch.float8_e4m3fn for name, dtype in dtypes.items() if name.startswith("nextn.")
    )
    assert mixed.nextn is not None
    assert (mixed.target.place.keep_fp8, mixed.nextn.place.keep_fp8) == (keep_fp8, False)
    if not keep_fp8:
        assert_same_parameters(parameters(mixed), parameters(build(small)))


def test_a_plain_checkpoint_never_allocates_fp8(tmp_path: Path) -> None:
    """Without scales on disk modules are built plain, whatever quantization_config says."""
    write_random_checkpoint(small_config(), tmp_path / "model", stored_as="bf16")
    (tmp_path / "model" / "config.json").write_text(json.dumps(small_config()))
    models = build(tmp_path / "model", keep_fp8=True)
    assert models.nextn is not None
    assert not models.target.place.keep_fp8
    assert not models.nextn.place.keep_fp8


@pytest.mark.parametrize("copies", [False, True])
def test_nextn_comes_from_an_exported_directory(small: Path, tmp_path: Path, copies: bool) -> None:
    """Both historical forms of an exported layer load, equal to the layer in the main checkpoint."""
    draft = tmp_path / "draft"
    export_nextn(small, draft, progress=False)
    if copies:
        table = read_all(draft)
        table["model.layers.0.embed_tokens.weight"] = torch.zeros(512, 256)
        table["model.layers.0.shared_head.head.weight"] = torch.zeros(512, 256)
        draft = write(tmp_path / "copies", table, (draft / "config.json").read_text())
    expected = parameters(build(small))
    assert_same_parameters(parameters(build(small, draft_model=str(draft))), expected)
    assert any(name.startswith("nextn.") for name in expected)


def test_nextn_comes_from_another_full_checkpoint(small: Path, tmp_path: Path) -> None:
    """A target shipped without its NextN layer takes it from a full checkpoint of the same model."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    bare = rewrite(small, tmp_path / "bare", change)
    assert_same_parameters(parameters(build(bare, draft_model=str(small))), parameters(build(small)))


def test_a_draft_directory_must_hold_the_whole_layer_and_nothing_else(small: Path, tmp_path: Path) -> None:
    """Missing and left-over tensors of an exported layer are named by their names in that directory."""
    draft = tmp_path / "draft"
    export_nextn(small, draft, progress=False)
    bad = rewrite(
        draft,
        tmp_path / "bad",
        lambda t: t.update({"model.norm.weight": t.pop("model.layers.0.enorm.weight")}),
    )
    with pytest.raises(
        CheckpointError, match=r"missing \(1\): model\.layers\.0\.enorm\.weight.*left over \(1\): model\.norm"
    ):
        build(small, draft_model=str(bad))


def test_a_draft_of_another_model_is_refused(small: Path, tmp_path: Path) -> None:
    """The error names the fields that differ, with both values."""
    config = small_config(hidden_size=128, vocab_size=256, architectures=["DeepseekV3ForCausalLMNextN"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"vocab_size is 256 instead of 512, hidden_size is 128 instead of 256"
    ):
        build(small, draft_model=str(tmp_path))


def test_a_draft_directory_without_a_layer_is_refused(small: Path, tmp_path: Path) -> None:
    """A checkpoint that has no NextN layer cannot be a draft."""
    (tmp_path / "config.json").write_text(json.dumps(small_config(num_nextn_predict_layers=0)))
    with pytest.raises(CheckpointError, match="has no NextN layer to draft with"):
        build(small, draft_model=str(tmp_path))


def test_an_exported_layer_is_not_a_model(small: Path, tmp_path: Path) -> None:
    """Given as MODEL, it is refused with the flag that it belongs to."""
    export_nextn(small, tmp_path / "draft", progress=False)
    with pytest.raises(CheckpointError, match="--draft-model"):
        build(tmp_path / "draft")


def test_without_speculation_the_layer_is_neither_built_nor_needed(small: Path, tmp_path: Path) -> None:
    """With spec None the target loads even where the NextN layer's shards are absent or broken."""
    path = tmp_path / "model"
    shutil.copytree(small, path)
    table = index_of(path)
    others = {file for name, file in table.items() if not name.startswith("model.layers.2.")}
    for file in set(table.values()) - others:
        (path / file).write_bytes(b"")
    assert set(table.values()) - others
    models = build(path, spec=None)
    assert models.nextn is None
    expected = {name: value for name, value in parameters(build(small)).items() if name.startswith("target.")}
    assert_same_parameters(parameters(models), expected)


def test_a_model_without_nextn_has_none_to_draft_with(tmp_path: Path) -> None:
    """A config that announces no NextN layer builds a plain target."""
    write_random_checkpoint(small_config(num_nextn_predict_layers=0), tmp_path / "model")
    assert build(tmp_path / "model").nextn is None


def test_an_announced_layer_that_is_absent_says_what_to_do(small: Path, tmp_path: Path) -> None:
    """Quantised repositories often lack the layer: the error gives its name and both ways out."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    bare = rewrite(small, tmp_path / "bare", change)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.2\.\* \(layers found: 0, 1\).*--spec off.*--draft-model"
    ):
        build(bare)
    assert build(bare, spec=None).nextn is None


def test_layer_1_is_not_layer_10(tmp_path: Path) -> None:
    """Only the NextN layer's own dotted prefix is skipped: with one layer, layer 10 is left over."""
    config = small_config(num_hidden_layers=1)
    write_random_checkpoint(config, tmp_path / "model")
    odd = rewrite(
        tmp_path / "model",
        tmp_path / "odd",
        lambda t: t.update({"model.layers.10.enorm.weight": torch.ones(256)}),
    )
    with pytest.raises(CheckpointError, match=r"left over \(1\): model\.layers\.10\.enorm\.weight"):
        build(odd, spec=None)
    assert build(tmp_path / "model").nextn is not None


def test_a_checkpoint_saved_by_transformers_loads(tmp_path: Path) -> None:
    """save_pretrained's names, dtypes and config are read; fused experts equal the library's own."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = small_config()
    for key in ("quantization_config", "architectures", "torch_dtype", "transformers_version"):
        config.pop(key)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config | {"num_nextn_predict_layers": 0}))
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    saved = parameters(build(tmp_path / "saved"))
    theirs = model.model.layers[1].mlp
    assert_close(saved["target.layers.1.mlp.experts.w13"], theirs.experts.gate_up_proj.data, "bitwise")
    assert_close(saved["target.layers.1.mlp.experts.w2"], theirs.experts.down_proj.data, "bitwise")
    bias = saved["target.layers.1.mlp.gate.e_score_correction_bias"]
    assert_close(bias, theirs.gate.e_score_correction_bias.data, "bitwise")
    assert bias.std() > 0


# Random weights


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_dummy_weights_fill_every_parameter(keep_fp8: bool) -> None:
    """No parameter keeps what memory held, and FP8 weights are FP8 where they are asked for."""
    models = build(None, tiny_config(), load_format="dummy", keep_fp8=keep_fp8)
    state = parameters(models)
    assert models.nextn is not None
    assert all(value.float().isfinite().all() for value in state.values())
    assert (state["target.layers.1.mlp.experts.w13"].dtype == torch.float8_e4m3fn) == keep_fp8
    again = parameters(build(None, tiny_config(), load_format="dummy", keep_fp8=keep_fp8))
    assert_same_parameters(again, state)
    other = parameters(build(None, tiny_config(), load_format="dummy", keep_fp8=keep_fp8, seed=1))
    assert (other["target.lm_head.proj.weight"] != state["target.lm_head.proj.weight"]).any()


def test_dummy_activations_stay_of_order_one_and_reach_all_experts() -> None:
    """Hidden states neither vanish nor explode, and the routers' choices spread over all experts."""
    models = build(None, tiny_config(), load_format="dummy", keep_fp8=True)
    seen: list[Tensor] = []
    for layer in models.target.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out[1].unique()))
    tokens = torch.randint(512, (64,))
    inp = PrefillInput(
        tokens, torch.arange(64), torch.arange(64), torch.zeros(1, 1, dtype=torch.int64), (0, 64), (0,)
    )
    assert 0.9 < float(models.target.embed(tokens).std()) < 1.1
    hidden = models.target.prefill(inp, torch.zeros(5, 1, 64, models.cfg.latent_dim)).hidden
    assert 0.5 < float(hidden.std()) < 10
    logits = models.target.logits(models.target.final_norm(hidden))
    assert 0.3 < float(logits.std()) < 3
    assert [len(experts) for experts in seen] == [16, 16, 16]


def test_random_fp8_has_no_nan_and_the_wanted_spread() -> None:
    """All codes but the two NaNs occur, and the scale gives the values the standard deviation asked for."""
    specs, got = capturing([spec for spec in specs_of(tiny_config()) if spec.name == Q_A])
    fill_dummy(specs, seed=3, device=CPU, dtype=torch.bfloat16, keep_fp8=True)
    weight, scale = got[Q_A]
    assert scale is not None
    codes = set(weight.view(torch.uint8).flatten().tolist())
    assert codes == set(range(256)) - {0x7F, 0xFF}
    std = float(reference({"w": weight, "w_scale_inv": scale}, "w").std())
    assert abs(std / weight_std(specs[0]) - 1) < 0.05
    short, scales = random_fp8((130, 5), 1.0, torch.Generator(), (128, 128))
    assert (short.shape, scales.shape) == ((130, 5), (2, 1))


def test_ranks_agree_on_what_they_share_and_differ_in_their_parts() -> None:
    """A tensor that every rank holds entire is the same on all, whatever else a rank drew before it."""
    parts = []
    for rank in (0, 1):
        specs, got = capturing(specs_of(tiny_config(), tp=TensorParallel(rank, 2)))
        fill_dummy(specs, seed=0, device=CPU, dtype=torch.float32, keep_fp8=True)
        parts.append((specs, got))
    shared = 0
    for spec, twin in zip(parts[0][0], parts[1][0], strict=True):
        first, second = parts[0][1][spec.name][0], parts[1][1][spec.name][0]
        assert bool((first.float() == second.float()).all()) == (spec.shard == twin.shard), spec.name
        shared += spec.shard == twin.shard
    assert 0 < shared < len(parts[0][0])


def test_weights_need_a_directory_unless_they_are_dummies() -> None:
    """Without a directory there is nothing to read."""
    with pytest.raises(CheckpointError, match="--load-format is dummy"):
        build(None, tiny_config())
