"""Conversion of whole checkpoints: what changes and what does not, to the bit, and every doubt an error."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from nextn.config import ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import FP8, Block, dequantize
from nextn.models import conversion, convert, output
from nextn.models.checkpoint import StoredTensor, read_header
from nextn.models.conversion import convert_tensor, corrected_config, is_converted, quantizable
from nextn.models.convert import RECORD_NAME, convert_checkpoint, main
from nextn.models.export import export_nextn
from nextn.models.fp8 import dequantize_blocks, quantize_blocks
from nextn.models.loader import load_checkpoint
from nextn.models.output import NewTensor
from nextn.models.random_checkpoint import write_random_checkpoint
from nextn.models.reader import DTYPES
from tests.compare import assert_close
from tests.models.checkpoints import (  # noqa: F401 - small_readers serves by being here
    OTHER_FILES,
    Tensors,
    capturing,
    read_all,
    reference,
    rewrite,
    small_config,
    small_readers,
    snapshot,
    specs_of,
    tiny_config,
)  # fmt: skip

BLOCK = (128, 128)
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
Made = dict[str, Tensor]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint with NextN and its copies, in shards, among other files."""
    path = tmp_path_factory.mktemp("checkpoints") / "source"
    write_random_checkpoint(small_config(), path, shard_size=10**6)
    for name, text in OTHER_FILES.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in bf16, its config.json without quantization_config."""
    path = tmp_path_factory.mktemp("checkpoints") / "plain"
    write_random_checkpoint(small_config(), path, stored_as="bf16", shard_size=10**6)
    return path


def run(source: Path, out: Path, dtype: Any, **options: Any) -> convert.ConvertReport:
    return convert_checkpoint(source, out, dtype, progress=False, **options)


def stored_in(path: Path, tensors: Tensors) -> dict[str, StoredTensor]:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "x.safetensors")
    return read_header(path / "x.safetensors")


def make(new: Iterable[NewTensor]) -> Made:
    """The tensors that pieces make up."""
    made = {}
    for tensor in new:
        data = bytearray(b"".join(bytes(piece) for piece in tensor.pieces()))
        assert len(data) == tensor.nbytes
        flat = torch.frombuffer(data, dtype=DTYPES[tensor.dtype]) if data else torch.empty(0)
        made[tensor.name] = flat.to(DTYPES[tensor.dtype]).view(tensor.shape)
    return made


# One tensor

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantize", [True, False])
def test_float_weights_become_what_is_asked_for(tmp_path: Path, dtype: str, quantize: bool) -> None:
    """keep: the bytes; bf16: rounded; fp8: codes and scales where they may be, else bf16."""
    weight = torch.randn(130, 70).to(FLOATS[dtype])
    stored = stored_in(tmp_path, {"w": weight})["w"]
    options: Any = {"quantize": quantize, "block_size": (16, 32)}
    kept, plain, small = (
        make(convert_tensor("new", stored, None, to, **options)) for to in ("keep", "bf16", "fp8")
    )
    assert_close(kept.pop("new"), weight, "bitwise")
    assert_close(plain.pop("new"), weight.bfloat16(), "bitwise")
    if quantize:
        codes, scale = quantize_blocks(weight, (16, 32))
        assert_close(small.pop("new"), codes, "bitwise")
        assert_close(small.pop("new_scale_inv"), scale, "bitwise")
    else:
        assert_close(small.pop("new"), weight.bfloat16(), "bitwise")
    assert not kept
    assert not plain
    assert not small


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_weights_become_bf16_or_stay(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    """fp8 and keep copy codes and scales of any dtype; bf16 is the product, rounded to float32, then bf16."""
    codes, scale = quantize_blocks(torch.randn(300, 200), BLOCK)
    scale = scale.to(scale_dtype)
    stored = stored_in(tmp_path, {"w": codes, "w_scale_inv": scale})
    for to in ("keep", "fp8"):
        made = make(
            convert_tensor("n", stored["w"], stored["w_scale_inv"], to, quantize=True, block_size=BLOCK)
        )  # type: ignore[arg-type]
        assert made.keys() == {"n", "n_scale_inv"}
        assert_close(made["n"], codes, "bitwise")
        assert_close(made["n_scale_inv"], scale, "bitwise")
    made = make(
        convert_tensor("n", stored["w"], stored["w_scale_inv"], "bf16", quantize=True, block_size=BLOCK)
    )
    assert made.keys() == {"n"}
    assert_close(made["n"], dequantize(codes, scale, BLOCK, torch.float32).bfloat16(), "bitwise")


@given(
    st.integers(1, 90), st.integers(1, 90),
    st.tuples(st.sampled_from([1, 7, 16, 128]), st.sampled_from([1, 16, 128])),
    st.sampled_from(list(FLOATS)), st.integers(1, 20_000),
)  # fmt: skip
@settings(max_examples=60)
def test_pieces_of_any_size_make_up_the_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, block: Block, dtype: str, piece: int
) -> None:
    """However many rows of blocks a piece has, both directions equal the conversion of the whole tensor."""
    folder = tmp_path_factory.mktemp("pieces")
    weight = torch.randn(rows, columns).to(FLOATS[dtype])
    codes, scale = quantize_blocks(weight, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "PIECE_BYTES", piece)
        stored = stored_in(folder, {"w": weight, "c": codes, "s": scale})
        small = convert_tensor("n", stored["w"], None, "fp8", quantize=True, block_size=block)
        made = make(small)
        assert_close(made["n"], codes, "bitwise")
        assert_close(made["n_scale_inv"], scale, "bitwise")
        assert_close(make(small[1:])["n_scale_inv"], scale, "bitwise", what="scales asked for alone")
        large = convert_tensor("n", stored["c"], stored["s"], "bf16", quantize=True, block_size=block)
        expected = dequantize(codes, scale, block, torch.bfloat16)
        assert_close(make(large)["n"], expected, "bitwise")
        most = max(memoryview(p).nbytes for new in (*small, *large) for p in new.pieces())
    assert most <= max(4 * piece, 4 * block[0] * columns), "scales have an item a block"


def test_scales_cost_no_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is read and quantised once for its codes and its scales, if asked for in this order."""
    stored, passes = stored_in(tmp_path, {"w": torch.randn(64, 64)})["w"], []
    quantize = conversion._quantized
    monkeypatch.setattr(conversion, "_quantized", lambda *args: passes.append(1) or quantize(*args))
    make(convert_tensor("n", stored, None, "fp8", quantize=True, block_size=(16, 16)))
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.e_score_correction_bias", "x.rotary_emb.inv_freq"])
def test_what_every_format_keeps_in_float32_stays(tmp_path: Path, name: str) -> None:
    """The correction bias decides which experts are chosen, and bf16 would change the choice."""
    stored = stored_in(tmp_path, {name: torch.randn(16)})[name]
    for to in ("bf16", "fp8"):
        assert not is_converted(stored, to, quantize=False)  # type: ignore[arg-type]
        (new,) = convert_tensor(name, stored, None, to, quantize=False, block_size=BLOCK)  # type: ignore[arg-type]
        assert new.dtype == "F32"


E8M0_NAN = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
DAMAGED: dict[str, tuple[Tensors, str]] = {
    "NaN code": ({"w": torch.tensor([[1.0, math.nan]]).to(FP8), "s": torch.ones(1, 1)}, "bf16"),
    "NaN code, copied": ({"w": torch.tensor([[1.0, math.nan]]).to(FP8), "s": torch.ones(1, 1)}, "fp8"),
    "infinite scale": ({"w": torch.ones(1, 2).to(FP8), "s": torch.tensor([[math.inf]])}, "bf16"),
    "NaN scale, copied": ({"w": torch.ones(1, 2).to(FP8), "s": torch.full((1, 1), math.nan)}, "keep"),
    "NaN in E8M0": ({"w": torch.ones(1, 2).to(FP8), "s": E8M0_NAN}, "keep"),
    "product beyond bf16": ({"w": torch.full((1, 2), 448.0).to(FP8), "s": torch.tensor([[1e37]])}, "bf16"),
    "negative scale": ({"w": torch.ones(1, 2).to(FP8), "s": torch.tensor([[-1.0]])}, "bf16"),
    "negative scale, copied": ({"w": torch.ones(1, 2).to(FP8), "s": torch.tensor([[-1.0]])}, "fp8"),
    "NaN": ({"w": torch.tensor([[1.0, math.nan]])}, "bf16"),
    "NaN, quantised": ({"w": torch.tensor([[1.0, math.nan]])}, "fp8"),
    "infinity, quantised": ({"w": torch.tensor([[1.0, -math.inf]]).bfloat16()}, "fp8"),
    "infinity, copied": ({"w": torch.tensor([[1.0, math.inf]]).bfloat16()}, "bf16"),
    "NaN in fp16": ({"w": torch.tensor([[1.0, math.nan]]).half()}, "keep"),
    "beyond bf16": ({"w": torch.tensor([[3.4e38, 1.0]])}, "bf16"),
    "NaN in fp64": ({"w": torch.tensor([[math.nan, 1.0]]).double()}, "keep"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_values_that_no_model_has_are_damage(tmp_path: Path, kind: str) -> None:
    """In weights and scales, converted or copied: an error that names the file and the tensor."""
    tensors, to = DAMAGED[kind]
    stored = stored_in(tmp_path, tensors)
    new = convert_tensor("n", stored["w"], stored.get("s"), to, quantize=True, block_size=BLOCK)  # type: ignore[arg-type]
    kinds = r"holds values that are not finite|is not finite|holds negative scales"
    with pytest.raises(CheckpointError, match=rf"x\.safetensors.*[ws] ({kinds})"):
        make(new)


def test_a_source_that_ends_early_or_goes_away_is_named(tmp_path: Path) -> None:
    """Whether its bytes are converted or copied, reading fails with a sentence about the source."""
    weight = stored_in(tmp_path, {"w": torch.randn(64, 64)})["w"]
    whole = weight.file.read_bytes()
    for to in ("keep", "bf16", "fp8"):
        new = convert_tensor("n", weight, None, to, quantize=True, block_size=BLOCK)  # type: ignore[arg-type]
        weight.file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=r"x\.safetensors ended inside w"):
            make(new)
        weight.file.unlink()
        with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read at w"):
            make(new)
        weight.file.write_bytes(whole)


# There and back again


@given(st.integers(1, 200), st.integers(1, 200), st.integers(-20, 20))
@settings(max_examples=40)
def test_fp8_to_bf16_and_back_gives_the_same_codes_where_blocks_use_the_whole_range(
    rows: int, columns: int, power: int
) -> None:
    """As the format's own quantisation leaves them (largest code 448); scales move by a rounding to bf16."""
    codes, scale = quantize_blocks(torch.randn(rows, columns) * 2.0**power, (64, 64))
    again, rescaled = quantize_blocks(dequantize_blocks(codes, scale, (64, 64), torch.bfloat16), (64, 64))
    assert_close(again, codes, "bitwise")
    assert ((rescaled / scale - 1).abs() <= 2.0**-8).all()


@given(st.integers(1, 200), st.integers(1, 200))
@settings(max_examples=40)
def test_fp8_to_bf16_and_back_keeps_values_within_a_rounding_elsewhere(rows: int, columns: int) -> None:
    """Blocks that do not reach 448, as with scales of powers of two: values move by e4m3's rounding, 2^-4."""
    codes, scale = quantize_blocks(torch.randn(rows, columns), (64, 64))
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (codes.float() * 0.6).to(FP8)
    before = dequantize_blocks(codes, scale, (64, 64), torch.float32)
    again, rescaled = quantize_blocks(before.bfloat16(), (64, 64))
    after = dequantize_blocks(again, rescaled, (64, 64), torch.float32)
    step = rescaled.repeat_interleave(64, 0)[:rows].repeat_interleave(64, 1)[:, :columns] * 2.0**-10
    assert ((after - before).abs() <= torch.maximum(before.abs() * (2.0**-4 + 2.0**-7), step * 1.01)).all()


# Whole checkpoints


def test_fp8_becomes_bf16(fp8: Path, tmp_path: Path) -> None:
    """Every weight is the rounded product, scales are gone, all else is the same bytes, copies too."""
    report = run(fp8, tmp_path / "out", "bf16", verify=True)
    before, after = read_all(fp8), read_all(tmp_path / "out")
    scales = {name for name in before if name.endswith("_scale_inv")}
    assert after.keys() == before.keys() - scales
    assert COPIES[0] in after
    for name, tensor in after.items():
        expected = before[name]
        if f"{name}_scale_inv" in scales:
            expected = dequantize(expected, before[f"{name}_scale_inv"], BLOCK, torch.bfloat16)
        assert_close(tensor, expected, "bitwise", what=name)
    assert (report.tensors, report.converted, report.verified) == (len(after), len(scales), True)
    assert report.read_bytes == sum(t.nbytes for t in before.values())
    assert report.written_bytes == sum(t.nbytes for t in after.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((fp8 / "config.json").read_text())
    assert original.pop("quantization_config")
    assert config == original
    assert all((tmp_path / "out" / name).read_text() == text for name, text in OTHER_FILES.items())
    assert report.copied_files == len(OTHER_FILES)


def test_bf16_becomes_fp8_and_loads(bf16: Path, tmp_path: Path) -> None:
    """What the loader gets is quantize_blocks of the bf16 weights: the official set, eh_proj stays bf16."""
    report = run(bf16, tmp_path / "out", "fp8", verify=True, shard_size=400_000)
    specs, got = capturing(specs_of(small_config()))
    load_checkpoint(tmp_path / "out", specs, skip=lambda name: name in COPIES, progress=False)
    before = read_all(bf16)
    for spec in specs:
        weight, scale = got[spec.name]
        assert (scale is not None) == quantizable(spec)
        if scale is None:
            assert_close(weight, before[spec.name], "bitwise", what=spec.name)
        else:
            codes, expected = quantize_blocks(before[spec.name], BLOCK)
            assert_close(weight, codes, "bitwise", what=spec.name)
            assert_close(scale, expected, "bitwise", what=spec.name)
    assert "eh_proj" in "".join(spec.name for spec in specs if not quantizable(spec))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert ModelConfig.from_dir(tmp_path / "out").weight_block_size == BLOCK
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) == report.files > 3
    assert index["metadata"]["total_size"] == report.written_bytes
    for file in files:
        header = read_header(tmp_path / "out" / file)
        assert all(f"{n}_scale_inv" in header for n, t in header.items() if t.dtype == "F8_E4M3")
        assert len(header) <= 2 or sum(t.nbytes for t in header.values()) <= 400_000


def to_dtype(match: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if match in name and not name.endswith("_scale_inv")]:
            scale = tensors.pop(f"{name}_scale_inv", None)
            if scale is None:
                tensors[name] = tensors[name].to(dtype)
            else:
                tensors[name] = dequantize(tensors[name], scale, BLOCK, dtype)

    return change


def test_a_mixed_checkpoint_becomes_one_format(fp8: Path, tmp_path: Path) -> None:
    """Some weights FP8, some fp32, some fp16: only what is not in the format yet changes."""
    mixed = rewrite(fp8, tmp_path / "mixed", to_dtype("up_proj.weight", torch.float32))
    before = read_all(mixed)
    report = run(mixed, tmp_path / "fp8", "fp8")
    after = read_all(tmp_path / "fp8")
    assert after.keys() == read_all(fp8).keys()
    changed = [name for name in before if before[name].dtype != after[name].dtype]
    assert len(changed) == report.converted > 5
    assert all(name.endswith("up_proj.weight") for name in changed)
    for name, tensor in before.items():
        if name not in changed:
            assert_close(after[name], tensor, "bitwise", what=name)
    run(mixed, tmp_path / "bf16", "bf16")
    after = read_all(tmp_path / "bf16")
    biases = {name for name, tensor in after.items() if tensor.dtype != torch.bfloat16}
    assert biases
    assert all(name.endswith("e_score_correction_bias") for name in biases)
    for name in changed:
        assert_close(after[name], before[name].bfloat16(), "bitwise", what=name)


def test_an_eh_proj_in_fp8_is_not_in_the_official_format(fp8: Path, tmp_path: Path) -> None:
    """It becomes bf16, and nothing else changes."""
    name = "model.layers.2.eh_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensors[name], BLOCK)

    source = rewrite(fp8, tmp_path / "source", change)
    assert run(source, tmp_path / "out", "fp8").converted == 1
    found, before = read_all(tmp_path / "out"), read_all(source)
    assert found.keys() == before.keys() - {f"{name}_scale_inv"}
    for key, tensor in found.items():
        wanted = before[key] if key != name else reference(before, name).bfloat16()
        assert_close(tensor, wanted, "bitwise", what=key)


def without_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        del tensors[name]


def test_a_checkpoint_that_was_shipped_without_its_nextn_layer_is_converted(
    fp8: Path, tmp_path: Path
) -> None:
    """config.json announces it, no tensor of it is there: the engine runs such a model, so it converts."""
    source = rewrite(fp8, tmp_path / "source", without_layer)
    run(source, tmp_path / "out", "bf16")
    assert read_all(tmp_path / "out").keys() == {n for n in read_all(source) if not n.endswith("_scale_inv")}


def test_tensors_that_no_model_reads_come_along(fp8: Path, tmp_path: Path) -> None:
    """Frequencies in old checkpoints are copied as they are."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = rewrite(fp8, tmp_path / "source", lambda tensors: tensors.update({name: torch.randn(8)}))
    run(source, tmp_path / "out", "bf16")
    assert_close(read_all(tmp_path / "out")[name], read_all(source)[name], "bitwise")


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "keep": ({"quantization_config": {"fmt": "e4m3"}}, {"has_fp8": True, "dtype": None}, {}),
    "keep without FP8": (
        {"quantization_config": {"fmt": "e4m3"}, "dtype": "float32"},
        {"has_fp8": False, "dtype": None},
        {"dtype": "float32"},
    ),
    "bf16": (
        {"quantization_config": {"fmt": "e4m3"}, "torch_dtype": "bfloat16"},
        {"has_fp8": False, "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
    ),
    "bf16 from float32": (
        {"torch_dtype": "float32", "dtype": "float32"},
        {"has_fp8": False, "dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
    ),
    "newer field": ({"dtype": "float16"}, {"has_fp8": False, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
}
OFFICIAL = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_says_what_the_weights_are(case: str) -> None:
    """quantization_config is there exactly if some tensor is FP8, and dtypes follow a conversion."""
    config, options, expected = CONFIGS[case]
    if options["has_fp8"]:
        expected = expected | {"quantization_config": OFFICIAL}
    assert corrected_config(config | {"x": 1}, **options) == expected | {"x": 1}


def test_a_block_size_stays_and_a_promise_about_scales_goes_with_the_scales() -> None:
    """scale_fmt says that scales are powers of two, which new float32 scales are not."""
    given_config = {"quantization_config": OFFICIAL | {"weight_block_size": [64, 32], "scale_fmt": "ue8m0"}}
    kept = corrected_config(given_config, has_fp8=True, dtype="bfloat16")
    assert kept["quantization_config"] == given_config["quantization_config"]
    anew = corrected_config(given_config, has_fp8=True, dtype="bfloat16", new_scales=True)
    assert anew["quantization_config"] == OFFICIAL | {"weight_block_size": [64, 32]}
    assert "scale_fmt" in given_config["quantization_config"]


def test_a_block_size_of_its_own_is_read(tmp_path: Path) -> None:
    """FP8 of other blocks than 128 x 128 is read by what config.json says."""
    config = small_config()
    config["quantization_config"] = config["quantization_config"] | {"weight_block_size": [64, 32]}
    write_random_checkpoint(config, tmp_path / "source")
    run(tmp_path / "source", tmp_path / "out", "bf16")
    before, after = read_all(tmp_path / "source"), read_all(tmp_path / "out")
    name = "model.layers.0.self_attn.o_proj.weight"
    expected = dequantize(before[name], before[f"{name}_scale_inv"], (64, 32), torch.bfloat16)
    assert_close(after[name], expected, "bitwise")


# Refusals

FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"missing \(1\): model\.norm\.weight"),
    "left over": (lambda t: t.update(x=torch.zeros(1)), r"left over \(1\): x"),
    "no scale": (
        lambda t: t.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"),
        r"FP8 without a scale \(1\): model\.layers\.0\.self_attn\.o_proj",
    ),
    "shape": (lambda t: t.update({COPIES[0]: torch.zeros(3, 3)}), r"embed_tokens\.weight is \[3, 3\]"),
    "half a layer": (lambda t: t.pop("model.layers.2.enorm.weight"), r"missing \(1\): model\.layers\.2\."),
    "damage": (
        lambda t: t["model.layers.1.mlp.experts.0.up_proj.weight"].view(torch.uint8)[0, :1].fill_(0x7F),
        r"experts\.0\.up_proj\.weight holds values that are not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unfit_checkpoint_is_refused_and_there_is_no_output(
    fp8: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors are named, the exit status is 1, and the output does not exist."""
    change, message = FAULTS[fault]
    bad = rewrite(fp8, tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=message):
        run(bad, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()
    assert main(["--input-dir", str(bad), "--output-dir", str(tmp_path / "out"), "--dtype", "bf16"]) == 1
    assert capsys.readouterr().err.startswith("nextn-convert: ")


def test_nothing_to_do_is_refused(fp8: Path, bf16: Path, tmp_path: Path) -> None:
    """A checkpoint that is in the format already, and an exported layer."""
    for source, dtype in ((fp8, "fp8"), (bf16, "bf16")):
        with pytest.raises(CheckpointError, match=f"is {dtype} already; there is nothing to convert"):
            run(source, tmp_path / "out", dtype)
    export_nextn(fp8, tmp_path / "draft", progress=False)
    with pytest.raises(CheckpointError, match="is an exported NextN layer; export it anew"):
        run(tmp_path / "draft", tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_only_an_earlier_conversion_is_replaced(fp8: Path, bf16: Path, tmp_path: Path) -> None:
    """--force does not replace a checkpoint that was not made by a conversion, nor the source."""
    with pytest.raises(CheckpointError, match="must lie outside"):
        run(fp8, fp8 / "out", "bf16")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="is not empty"):
        run(fp8, tmp_path / "original", "bf16")
    with pytest.raises(CheckpointError, match="is not an earlier output"):
        run(fp8, tmp_path / "original", "bf16", force=True)
    assert (tmp_path / "original" / "model.safetensors").read_bytes() == b"precious"
    run(fp8, tmp_path / "out", "bf16")
    assert (tmp_path / "out" / RECORD_NAME).is_file()
    run(bf16, tmp_path / "out", "fp8", force=True)
    assert any(name.endswith("_scale_inv") for name in read_all(tmp_path / "out"))
    run(tmp_path / "out", tmp_path / "again", "bf16")  # a conversion is a checkpoint like any other
    assert json.loads((tmp_path / "again" / RECORD_NAME).read_text()) == {
        "source": "out",
        "stored_as": "bf16",
    }


# Interruptions


def break_at(patch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Let reading of the stored tensor `name` fail from now on."""
    pieces = conversion._row_pieces

    def fail(stored: StoredTensor, *args: Any) -> Any:
        if stored.name == name:
            raise error
        return pieces(stored, *args)

    patch.setattr(conversion, "_row_pieces", fail)


def count_made(patch: pytest.MonkeyPatch, made: list[str]) -> None:
    """Note the names of the stored tensors that are converted from now on."""
    pieces = conversion._row_pieces
    patch.setattr(
        conversion, "_row_pieces", lambda stored, *args: made.append(stored.name) or pieces(stored, *args)
    )


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"]
)
def test_an_interrupted_conversion_is_gone_on_with(fp8: Path, tmp_path: Path, name: str) -> None:
    """Two runs give the bytes of one; a source that changed in between is converted from the start."""
    run(fp8, tmp_path / "whole", "bf16", shard_size=500_000)
    source = tmp_path / fp8.name
    source.symlink_to(fp8)
    arguments = ["--input-dir", str(source), "--output-dir", str(tmp_path / "out"), "--dtype", "bf16"]
    arguments += ["--shard-size", "500KB"]
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, name, KeyboardInterrupt())
        assert main(arguments) == 130
    assert not (tmp_path / "out").exists()
    files = list((tmp_path / ".out.partial" / "output").glob("*.safetensors"))
    written = {name for file in files for name in read_header(file)}
    with pytest.MonkeyPatch.context() as patch:
        count_made(patch, made)
        assert main(arguments) == 0
    assert written
    assert name in made
    assert written.isdisjoint(made), "what is in whole files is not converted again"
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


def test_a_source_that_changes_between_two_runs_is_converted_anew(fp8: Path, tmp_path: Path) -> None:
    """Nothing of the older state is taken into the output."""
    source = rewrite(fp8, tmp_path / "source", lambda tensors: None)
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, "model.layers.2.mlp.experts.3.up_proj.weight", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", "bf16", shard_size=500_000)
    os.rename(source, tmp_path / "old")
    rewrite(tmp_path / "old", source, lambda tensors: tensors["model.norm.weight"].fill_(2))
    run(source, tmp_path / "out", "bf16", shard_size=500_000)
    run(source, tmp_path / "whole", "bf16", shard_size=500_000)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_a_source_that_changes_while_it_is_read_fails_the_run(fp8: Path, tmp_path: Path) -> None:
    """Half of the old and half of the new state is no checkpoint."""
    source, pieces = rewrite(fp8, tmp_path / "source", lambda tensors: None), conversion._row_pieces

    def touch(*args: Any) -> Any:
        os.utime(source / "model.safetensors", ns=(1, 1))
        return pieces(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_row_pieces", touch)
        with pytest.raises(CheckpointError, match=r"changed while they were read: .*model\.safetensors"):
            run(source, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_verify_finds_a_flipped_bit(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that changed on its way to the disk fails the run, and the next one makes its file again."""
    write = output.write_files

    def flip(staging: Path, *args: Any) -> None:
        write(staging, *args)
        file = min(staging.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_files", flip)
        with pytest.raises(CheckpointError, match="differs from what was to be written"):
            run(fp8, tmp_path / "out", "bf16", verify=True)
    assert not (tmp_path / "out").exists()
    run(fp8, tmp_path / "out", "bf16", verify=True)


# The command, and what it uses


def test_command_prints_a_summary(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors, bytes in and out, seconds, GB/s; an unknown format is refused by the parser."""
    arguments = [
        "--input-dir",
        str(fp8),
        "--output-dir",
        str(tmp_path / "out"),
        "--dtype",
        "bf16",
        "--verify",
    ]
    assert main([*arguments, "--threads", "2"]) == 0
    text = capsys.readouterr().out
    for part in (" converted) in 1 files", " MB -> ", " GB/s)", "3 other files", "verified"):
        assert part in text
    with pytest.raises(SystemExit):
        main([*arguments[:-2], "int4"])


def test_no_file_stays_open(fp8: Path, tmp_path: Path) -> None:
    """As many descriptors afterwards as before."""
    before = len(os.listdir("/proc/self/fd"))
    run(fp8, tmp_path / "out", "bf16", verify=True)
    assert len(os.listdir("/proc/self/fd")) == before


PEAKS = """
import resource, sys
from pathlib import Path
from nextn.models.convert import convert_checkpoint
from nextn.models.checkpoint import read_config
from nextn.models.random_checkpoint import write_random_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

path = Path(sys.argv[1])
start = peak()
write_random_checkpoint(read_config(path), path / "source")
made = peak()
convert_checkpoint(path / "source", path / "out", "bf16", progress=False)
print(made - start, peak() - start)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Making 240 MB of FP8 and converting it to 480 MB takes 150 MB beside what imports take."""
    config = tiny_config(
        hidden_size=2048, intermediate_size=16384, vocab_size=2048, num_hidden_layers=2,
        first_k_dense_replace=2, num_nextn_predict_layers=0,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", PEAKS, str(tmp_path)]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("source", "out")]
    assert sizes[0] > 210e6, sizes
    assert sizes[1] > 420e6, sizes
    assert max(map(int, result.stdout.split())) < 150e6, result.stdout
