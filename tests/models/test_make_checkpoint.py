"""The checkpoint maker: official names, dtypes and shapes, reproducible values, refusals in a sentence."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nextn.errors import CheckpointError
from nextn.models import output, random_checkpoint
from nextn.models.dummy import weight_std
from nextn.models.fp8 import quantize_blocks
from nextn.models.output import NewTensor
from nextn.models.random_checkpoint import SMALL, StoredAs, write_checkpoint, write_random_checkpoint
from nextn.models.specs import TensorSpec
from tests.compare import assert_close
from tests.models.checkpoints import DATA, Tensors, read_all, small_config, snapshot, specs_of

SCRIPTS = DATA.parent.parent / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/make_checkpoint.py as a module."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPTS / "make_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected_names(config: dict[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of an official checkpoint, written out by hand from the format's description."""
    h, e = config["hidden_size"], config["n_routed_experts"]
    heads, kv, q = config["num_attention_heads"], config["kv_lora_rank"], config["q_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    vocab, layers, moe = config["vocab_size"], config["num_hidden_layers"], config["moe_intermediate_size"]
    names = {"model.embed_tokens": [vocab, h], "model.norm": [h], "lm_head": [vocab, h]}
    for layer in range(layers + 1):
        p = f"model.layers.{layer}."
        names |= {
            p + "input_layernorm": [h],
            p + "post_attention_layernorm": [h],
            p + "self_attn.q_a_proj": [q, h],
            p + "self_attn.q_a_layernorm": [q],
            p + "self_attn.q_b_proj": [heads * (nope + rope), q],
            p + "self_attn.kv_a_proj_with_mqa": [kv + rope, h],
            p + "self_attn.kv_a_layernorm": [kv],
            p + "self_attn.kv_b_proj": [heads * (nope + v), kv],
            p + "self_attn.o_proj": [h, heads * v],
        }
        mlps = {"mlp.": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            mlps = {f"mlp.experts.{i}.": moe for i in range(e)} | {"mlp.shared_experts.": moe}
            names[p + "mlp.gate"] = [e, h]
        for part, width in mlps.items():
            names |= {p + part + "gate_proj": [width, h], p + part + "up_proj": [width, h]}
            names[p + part + "down_proj"] = [h, width]
    p = f"model.layers.{layers}."
    names |= {p + "enorm": [h], p + "hnorm": [h], p + "eh_proj": [h, 2 * h], p + "shared_head.norm": [h]}
    names |= {p + "embed_tokens": [vocab, h], p + "shared_head.head": [vocab, h]}
    tensors = {f"{name}.weight": shape for name, shape in names.items()}
    for layer in range(config["first_k_dense_replace"], layers + 1):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = [e]
    return tensors


NOT_QUANTISED = ("norm.weight", "embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")


@pytest.mark.parametrize("stored_as", ["fp8", "bf16", "fp32"])
def test_checkpoint_has_the_official_names_shapes_and_dtypes(tmp_path: Path, stored_as: Any) -> None:
    """Linear layers but eh_proj are FP8 with float32 scales, the bias float32, others bf16; or one dtype."""
    write_random_checkpoint(small_config(), tmp_path / "model", stored_as=stored_as)
    tensors, dtypes = read_all(tmp_path / "model"), {}
    for name, shape in expected_names(small_config()).items():
        dtype = torch.float32 if stored_as == "fp32" else torch.bfloat16
        if name.endswith("e_score_correction_bias"):
            dtype = torch.float32
        elif stored_as == "fp8" and len(shape) == 2 and not name.endswith(NOT_QUANTISED):
            dtype = torch.float8_e4m3fn
            dtypes[f"{name}_scale_inv"] = (torch.float32, [-(-size // 128) for size in shape])
        dtypes[name] = (dtype, shape)
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()} == dtypes


def test_values_tell_tensors_apart(tmp_path: Path) -> None:
    """The bias is not zero, norms are not ones, scales differ; NextN's copies repeat the target's tensors."""
    write_random_checkpoint(small_config(), tmp_path / "model")
    tensors = read_all(tmp_path / "model")
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].abs().min() > 0
    assert tensors["model.norm.weight"].float().std() > 0.05
    assert tensors["model.layers.0.self_attn.q_a_proj.weight_scale_inv"].unique().numel() > 1
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert_close(tensors[f"model.layers.2.{copy}.weight"], tensors[f"{original}.weight"], "bitwise")
    first, second = (tensors[f"model.layers.1.mlp.experts.{i}.up_proj.weight"].float() for i in (0, 1))
    assert (first != second).any()


def test_a_seed_gives_the_same_values_whatever_the_dtype_or_shards(tmp_path: Path) -> None:
    """fp32 holds the numbers that bf16 rounds; another seed gives others."""
    write_random_checkpoint(small_config(), tmp_path / "a", stored_as="fp32", seed=5)
    write_random_checkpoint(small_config(), tmp_path / "b", stored_as="bf16", seed=5, shard_size=10**6)
    write_random_checkpoint(small_config(), tmp_path / "c", stored_as="bf16", seed=6)
    a, b, c = (read_all(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() == c.keys()
    for name, tensor in a.items():
        assert_close(b[name], tensor.to(b[name].dtype), "bitwise", what=name)
        assert (c[name] != b[name]).any()


def test_copies_of_embedding_and_head_are_an_option(tmp_path: Path) -> None:
    """Without them the checkpoint is the same but for two tensors."""
    write_random_checkpoint(small_config(), tmp_path / "with")
    write_random_checkpoint(small_config(), tmp_path / "without", nextn_copies=False)
    gone = read_all(tmp_path / "with").keys() - read_all(tmp_path / "without").keys()
    assert gone == {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}


@pytest.mark.parametrize("field", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("stored_as", ["fp8", "bf16", "fp32"])
def test_config_follows_the_dtype(tmp_path: Path, stored_as: Any, field: str | None) -> None:
    """FP8 files have a quantization_config, given or not; the dtype is in the field that the config has."""
    config = small_config()
    quantization = config.pop("quantization_config")
    del config["torch_dtype"]
    write_random_checkpoint(
        config | ({} if field is None else {field: "float16"}), tmp_path / "model", stored_as=stored_as
    )
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written.pop("quantization_config", None) == (quantization if stored_as == "fp8" else None)
    assert written == config | {field or "torch_dtype": "float32" if stored_as == "fp32" else "bfloat16"}


def wide_config() -> dict[str, Any]:
    """A small model some of whose tensors are large enough to be put together instead of drawn."""
    return small_config(
        hidden_size=1024, intermediate_size=1100, q_lora_rank=None, vocab_size=1500, num_attention_heads=9
    )


LARGE = {
    "model.layers.0.mlp.gate_proj.weight": (1100, 1024),  # the last row of blocks is short
    "model.layers.0.mlp.down_proj.weight": (1024, 1100),  # every row ends with a short block
    "model.layers.2.eh_proj.weight": (1024, 2048),
    "lm_head.weight": (1500, 1024),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    """Its tensors, in each format."""
    folder = tmp_path_factory.mktemp("wide")
    formats: tuple[StoredAs, ...] = ("fp8", "bf16", "fp32")
    for stored_as in formats:
        write_random_checkpoint(wide_config(), folder / stored_as, stored_as=stored_as)
    return {stored_as: read_all(folder / stored_as) for stored_as in formats}


def test_large_tensors_have_the_statistics_of_small_ones(wide: dict[str, Tensors]) -> None:
    """Normal values of the spec's spread in every row and column, and of both signs."""
    specs = {spec.name: spec for spec in specs_of(wide_config())}
    for name, shape in LARGE.items():
        values = wide["fp32"][name]
        assert values.shape == shape
        assert values.numel() > SMALL
        values = values / weight_std(specs[name])
        assert abs(values.std() - 1) < 0.01, name
        assert abs(values.mean()) < 0.01, name
        assert abs(values.pow(4).mean() - 3) < 0.2, name
        for dim in (0, 1):
            spread = values.std(dim)
            assert 0.8 < spread.min() <= spread.max() < 1.2, (name, dim)


def test_large_tensors_are_the_same_numbers_in_every_format(wide: dict[str, Tensors]) -> None:
    """bf16 rounds what fp32 holds; FP8 has its quantised values, up to the rounding of a scale."""
    for name in LARGE:
        plain = wide["fp32"][name]
        assert_close(wide["bf16"][name], plain.bfloat16(), "bitwise", what=name)
        if f"{name}_scale_inv" not in wide["fp8"]:
            assert_close(wide["fp8"][name], plain.bfloat16(), "bitwise", what=name)
            continue
        codes, scale = quantize_blocks(plain, (128, 128))
        assert_close(wide["fp8"][f"{name}_scale_inv"], scale, "fp32-op", what=name)
        differing = (wide["fp8"][name].float() != codes.float()).float().mean()
        assert differing < 1e-4, name  # quotients next to the middle of two codes


def test_no_two_blocks_are_alike_and_every_block_uses_the_whole_range(wide: dict[str, Tensors]) -> None:
    """No NaN code, a largest code of 448 in each block, no block nor scale twice, in one tensor or two."""
    blocks, scales = [], []
    for name in LARGE:
        if f"{name}_scale_inv" in wide["fp8"]:
            codes, scale = wide["fp8"][name], wide["fp8"][f"{name}_scale_inv"]
            assert codes.float().isfinite().all()
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    block = codes[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                    assert block.float().abs().max() == 448
                    blocks.append(block.contiguous().view(torch.uint8).numpy().tobytes())
            scales += scale.flatten().tolist()
    assert len(set(blocks)) == len(blocks) > 100
    assert len(set(scales)) == len(scales)


def test_large_values_follow_the_seed_and_the_name(tmp_path: Path) -> None:
    """The same call gives the same bytes; another seed, another tensor other ones."""
    shape = {"num_nextn_predict_layers": 0, "intermediate_size": 1100}
    config = wide_config() | shape
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_checkpoint(config, tmp_path / name, seed=seed)
    a, b, c = (read_all(tmp_path / name) for name in "abc")
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    assert_close(a[gate], b[gate], "bitwise")
    assert (a[gate].float() != c[gate].float()).float().mean() > 0.4
    assert (a[gate].float() != a[up].float()).float().mean() > 0.4


def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of two runs is that of one, and what the first one wrote is not made again."""
    monkeypatch.setattr(output, "default_threads", lambda: 1)  # so that no thread is behind the last file
    write_random_checkpoint(small_config(), tmp_path / "whole", shard_size=10**6)
    make, made = random_checkpoint._stored_tensors, []

    def interrupt(spec: TensorSpec, *args: Any) -> Any:
        def pieces(tensor: NewTensor) -> Any:
            made.append(tensor.name)
            if tensor.name == "model.layers.1.mlp.experts.2.up_proj.weight" and len(made) < 1000:
                made.extend([""] * 1000)
                raise KeyboardInterrupt
            return tensor.pieces()

        return [replace(tensor, pieces=partial(pieces, tensor)) for tensor in make(spec, *args)]

    monkeypatch.setattr(random_checkpoint, "_stored_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_random_checkpoint(small_config(), tmp_path / "out", shard_size=10**6)
    assert not (tmp_path / "out").exists()
    first = len(made) - 1000
    write_random_checkpoint(small_config(), tmp_path / "out", shard_size=10**6)
    assert len(made) - 1000 < first + len(read_all(tmp_path / "whole")) - 5
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


# Given weights


def test_given_weights_are_stored_in_the_official_format(tmp_path: Path) -> None:
    """Linear layers but eh_proj are quantised, the bias stays float32, all else is bf16; copies repeat."""
    specs = {spec.name: spec for spec in specs_of(small_config())}
    weights = {name: torch.randn(spec.shape) for name, spec in specs.items()}
    write_checkpoint(small_config(), tmp_path / "given", weights)
    write_random_checkpoint(small_config(), tmp_path / "random")
    written, random = read_all(tmp_path / "given"), read_all(tmp_path / "random")
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {
        n: (t.dtype, t.shape) for n, t in random.items()
    }
    for name, weight in weights.items():
        if written[name].dtype == torch.float8_e4m3fn:
            codes, scale = quantize_blocks(weight, (128, 128))
            assert_close(written[name], codes, "bitwise", what=name)
            assert_close(written[f"{name}_scale_inv"], scale, "bitwise", what=name)
        else:
            assert_close(written[name], weight.to(written[name].dtype), "bitwise", what=name)
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert_close(written[f"model.layers.2.{copy}.weight"], written[f"{original}.weight"], "bitwise")
    write_checkpoint(small_config(), tmp_path / "asked", weights.__getitem__)
    assert all(torch.equal(t.float(), written[n].float()) for n, t in read_all(tmp_path / "asked").items())


GIVEN: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop("lm_head.weight"), r"missing \(1\): lm_head\.weight"),
    "unknown": (lambda t: t.update(x=torch.ones(1)), r"not the model's \(1\): x"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"model\.norm\.weight is given as torch\.float32 \[3\]",
    ),
    "infinite": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"] / 0}),
        r"model\.norm\.weight is given with values that are not finite",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].int()}),
        r"model\.norm\.weight is given as torch\.int32",
    ),
}


@pytest.mark.parametrize("fault", GIVEN)
def test_given_weights_must_be_the_models(tmp_path: Path, fault: str) -> None:
    """Names, shapes and kinds of dtype; nothing is written otherwise."""
    weights = {spec.name: torch.ones(spec.shape) for spec in specs_of(small_config())}
    change, message = GIVEN[fault]
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(small_config(), tmp_path / "out", weights)
    assert not (tmp_path / "out").exists()


def test_command_writes_a_checkpoint_with_a_tokenizer(tmp_path: Path, script: ModuleType) -> None:
    """The script's options reach the checkpoint; the tokenizer's config.json and weights stay behind."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    own = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name in (*own, "config.json", "x.safetensors"):
        (tokenizer / name).write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    options = ["--config", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--dtype", "bf16"]
    options += ["--shard-size", "1MB", "--no-nextn-copies", "--tokenizer", str(tokenizer), "--seed", "7"]
    assert script.main(options) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert own | {"config.json"} <= names
    assert "x.safetensors" not in names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == small_config()["hidden_size"], "the tokenizer's own says nothing"
    shards = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(shards) > 1
    assert max(shards) < 1.1e6
    write_random_checkpoint(small_config(), tmp_path / "same", stored_as="bf16", seed=7, nextn_copies=False)
    written, same = read_all(tmp_path / "out"), read_all(tmp_path / "same")
    assert written.keys() == same.keys()
    assert all(torch.equal(written[name], same[name]) for name in same)


def test_refusals_are_sentences(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A filled output, a missing config and a directory without a tokenizer end with status 1, a reason."""
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    base = ["--config", str(tmp_path)]
    assert script.main([*base, "--output-dir", str(tmp_path)]) == 1
    assert f"{tmp_path} is not empty\n" in capsys.readouterr().err
    assert script.main(["--config", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert (
        script.main([*base, "--output-dir", str(tmp_path / "o"), "--tokenizer", str(tmp_path / "none")]) == 1
    )
    assert "holds no tokenizer files" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """The output must be a directory."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a directory"):
        write_random_checkpoint(small_config(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
