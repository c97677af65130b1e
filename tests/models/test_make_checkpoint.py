"""The checkpoint maker: official names, dtypes and shapes, reproducible values, refusals in a sentence."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import dequantize
from nextn.models.random_checkpoint import quantize_blocks, write_random_checkpoint, write_shards
from tests.compare import assert_close
from tests.models.checkpoints import DATA, read_all, small_config

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


def test_config_follows_the_dtype(tmp_path: Path) -> None:
    """FP8 files have a quantization_config, given or not; others have none."""
    config = small_config()
    quantization = config.pop("quantization_config")
    for stored_as, expected in (("fp8", quantization), ("bf16", None)):
        write_random_checkpoint(config, tmp_path / stored_as, stored_as=stored_as)  # type: ignore[arg-type]
        written = json.loads((tmp_path / stored_as / "config.json").read_text())
        assert written.pop("quantization_config", None) == expected
        assert written == config


def test_quantisation_keeps_every_value_within_half_a_step_of_its_block(tmp_path: Path) -> None:
    """e4m3 has 3 mantissa bits: the error is at most 1/16 of the value, or half the block's smallest step."""
    weight = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    weight[128:, :128] = 0
    codes, scale = quantize_blocks(weight, (128, 128))
    assert scale.shape == (2, 3)
    assert codes.is_contiguous()
    error = (dequantize(codes, scale, (128, 128), torch.float32) - weight).abs()
    step = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300] * 2.0**-9
    assert (error <= torch.maximum(weight.abs() / 16, step / 2) * 1.001).all()
    assert (codes.float().abs()[:128, :128].max(), codes.float().abs().max()) == (448, 448)


def test_shards_hold_at_most_their_size_and_no_tensor_is_split(tmp_path: Path) -> None:
    """Groups fill shards in order; a group that is larger than a shard gets one of its own."""
    groups = [{f"t{i}": torch.zeros(size)} for i, size in enumerate((100, 100, 1000, 10))]
    write_shards(tmp_path, groups, shard_size=850)
    table = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 3)]
    assert table["weight_map"] == {f"t{i}": file for i, file in enumerate(files)}
    assert table["metadata"]["total_size"] == 4 * 1210
    assert read_all(tmp_path).keys() == {"t0", "t1", "t2", "t3"}


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
    assert "is not an empty directory" in capsys.readouterr().err
    assert script.main(["--config", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert (
        script.main([*base, "--output-dir", str(tmp_path / "o"), "--tokenizer", str(tmp_path / "none")]) == 1
    )
    assert "holds no tokenizer files" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("5KB", 5000), ("2M", 2 * 10**6), ("4gb", 4 * 10**9)]
)
def test_sizes_are_decimal(script: ModuleType, text: str, size: int) -> None:
    """A number and an optional unit."""
    assert script.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1", "1.5GB", "3TB"])
def test_other_sizes_are_refused(script: ModuleType, text: str) -> None:
    """No guess is made about anything else."""
    with pytest.raises(argparse.ArgumentTypeError):
        script.parse_size(text)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """The output must be a directory."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is not an empty directory"):
        write_random_checkpoint(small_config(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
