"""Every family and format that loads, as a small checkpoint of its own, and those that are refused, and why.

A family is what its config.json says beyond sizes. For each, tensors come back exactly, the model runs, and
the draft is where it should be; files are written here and by transformers, and read by both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig
from nextn.engine.engine import Engine
from nextn.errors import CheckpointError
from nextn.models.export import export_nextn
from nextn.models.inputs import PrefillInput
from nextn.models.loader import load_checkpoint
from nextn.models.random_checkpoint import (
    StoredAs,
    plan_checkpoint,
    quantize_blocks,
    write_random_checkpoint,
)
from nextn.models.weights import NEXTN_COPIES, Models, build_models, is_ignored
from tests.compare import assert_close
from tests.models.checkpoints import (
    DATA,
    Tensors,
    capturing,
    read_all,
    reference,
    rewrite,
    small_config,
    specs_of,
)

YARN = small_config()["rope_scaling"]
TOKENS = [5, 17, 301, 88, 41, 0, 2, 95]


def fp8(**changes: Any) -> dict[str, Any]:
    return small_config()["quantization_config"] | changes


def modern(**changes: Any) -> dict[str, Any]:
    """The rotary settings as transformers 5 writes them: one dictionary, and no rope_theta beside it."""
    scaling = {key: value for key, value in YARN.items() if key != "type"}
    return {"rope_parameters": {**scaling, "rope_type": "yarn", "rope_theta": 10000.0, **changes}}


def keep(tensors: Tensors) -> None:
    """Leave a checkpoint as the maker wrote it."""


def with_ue8m0_values(tensors: Tensors) -> None:
    """Quantise anew with scales that are powers of two, stored as float32, as V3.1's are."""
    for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
        scale = torch.exp2(tensors[f"{name}_scale_inv"].log2().ceil())
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        plain = reference(tensors, name)
        tensors[name] = (plain / wide[: plain.shape[0], : plain.shape[1]]).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale


def with_e8m0_bytes(tensors: Tensors) -> None:
    """The same, stored as exponents alone."""
    with_ue8m0_values(tensors)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)


def with_mixed_dtypes(tensors: Tensors) -> None:
    """Every second FP8 weight plain, in bf16, fp16 and fp32 by turns; norms and routers in fp32."""
    weights = sorted(name for name in tensors if f"{name}_scale_inv" in tensors)
    for number, name in enumerate(weights[::2]):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
        tensors[name] = reference(tensors, name).to(dtype)
        del tensors[f"{name}_scale_inv"]
    for name in tensors:
        if name.endswith(("norm.weight", "mlp.gate.weight")):
            tensors[name] = tensors[name].float()


def with_old_frequencies(tensors: Tensors) -> None:
    """Tables of rotary frequencies, which old files carry and nobody reads."""
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@dataclass(frozen=True)
class Family:
    """What config.json says, how the tensors are stored, and what must come of it."""

    config: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    stored_as: StoredAs = "fp8"
    change: Callable[[Tensors], None] = keep
    nextn: bool = True
    expect: dict[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        config = small_config(**self.config)
        return {key: value for key, value in config.items() if key not in self.without}


KIMI = {
    "model_type": "kimi_k2", "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "eos_token_id": 258,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
}  # fmt: skip
V2_LITE = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
    "n_shared_experts": 2, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.001, "seq_aux": True,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "pretraining_tp": 1,
}  # fmt: skip
V2_ONLY = ("num_nextn_predict_layers", "quantization_config")

FAMILIES = {
    "V3": Family({"aux_loss_alpha": 0.001, "auto_map": {"AutoModel": "modeling_deepseek.X"}}),
    "V3-0324": Family({"transformers_version": "4.46.3"}),
    "R1": Family({"ep_size": 1, "num_key_value_heads": 4}),
    "R1-0528": Family({"rope_scaling": YARN | {"rope_type": "yarn"}}),
    "V3.1": Family({"quantization_config": fp8(scale_fmt="ue8m0")}, change=with_ue8m0_values),
    "V3.1 with exponents": Family(
        {"quantization_config": fp8(scale_fmt="ue8m0")}, change=with_e8m0_bytes
    ),
    "bf16": Family(without=("quantization_config",), stored_as="bf16"),
    "bf16 beside FP8's config": Family(stored_as="bf16"),
    "fp32": Family(without=("quantization_config",), stored_as="fp32"),
    "mixed per tensor": Family(change=with_mixed_dtypes),
    "Kimi-K2": Family(KIMI, nextn=False, expect={"eos_token_ids": (258,)}),
    "Kimi-K2 without the field": Family(KIMI, without=("num_nextn_predict_layers",), nextn=False),
    "V2-Lite": Family(V2_LITE, V2_ONLY, "bf16", nextn=False, expect={"q_lora_rank": None}),
    "V2": Family(
        V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 2, "q_lora_rank": 128},
        V2_ONLY, "bf16", nextn=False, expect={"topk_method": "group_limited_greedy"},
    ),
    "transformers 5's rotary settings": Family(modern(), without=("rope_theta", "rope_scaling")),
    "transformers' name of the layer": Family(
        {"num_mtp_layers": 1}, without=("num_nextn_predict_layers",)
    ),
    "plain rope": Family({"rope_scaling": None}),
    "old frequencies": Family(change=with_old_frequencies),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path]:
    """One family's checkpoint; config.json is the family's own, whatever the maker would write."""
    family, path = FAMILIES[request.param], tmp_path_factory.mktemp("family")
    config = family.config_json()
    write_random_checkpoint(config, path / "plain", stored_as=family.stored_as)
    made = rewrite(path / "plain", path / "made", family.change)
    (made / "config.json").write_text(json.dumps(config))
    return family, made


def build(path: Path, draft: Path | None = None, **engine: Any) -> Models:
    """Both models in float32 on the CPU."""
    settings = EngineConfig(draft_model=None if draft is None else str(draft), **engine)
    cfg, cpu = ModelConfig.from_dir(path), torch.device("cpu")
    return build_models(path, cfg, settings, cpu, torch.float32, 64, progress=False)


def states(models: Models) -> tuple[Tensor, Tensor | None]:
    """Logits of the target over TOKENS, and of the draft, where there is one."""
    count, cfg = len(TOKENS), models.cfg
    tokens, places = torch.tensor(TOKENS), torch.arange(count)
    inp = PrefillInput(tokens, places, places, torch.zeros(1, 1, dtype=torch.int64), (0, count), (0,))
    cache = torch.zeros(cfg.num_hidden_layers + 1, 1, 16, cfg.latent_dim)
    normed = models.target.prefill(inp, cache).normed
    if models.nextn is None:
        return models.target.logits(normed), None
    drafted = models.nextn.prefill(inp, normed, cache).normed
    return models.target.logits(normed), models.target.logits(drafted)


def test_every_tensor_of_a_family_arrives_exactly(checkpoint: tuple[Family, Path]) -> None:
    """Each spec gets the tensor of its name and nothing is left; scales become the numbers they stand for."""
    family, path = checkpoint
    config = family.config_json()
    specs, got = capturing(specs_of(config, nextn=family.nextn))
    copies = {f"model.layers.2.{name}" for name in NEXTN_COPIES}
    skip = lambda name: name in copies or is_ignored(name)  # noqa: E731
    report = load_checkpoint(path, specs, skip=skip, progress=False)
    stored = read_all(path)
    for name, (weight, scale) in got.items():
        assert_close(weight, stored[name], "bitwise", what=name)
        if scale is not None:
            assert_close(scale, stored[f"{name}_scale_inv"].float(), "bitwise", what=name)
    assert report.tensors == len(specs) == len(got)
    used = len(got) + sum(scale is not None for _, scale in got.values())
    assert len(stored) == used + report.skipped


def test_a_family_runs(checkpoint: tuple[Family, Path]) -> None:
    """Its config means what it says, its logits are finite and differ by token, and so do the draft's."""
    family, path = checkpoint
    models = build(path)
    assert (models.nextn is not None) == models.cfg.has_nextn == family.nextn
    for name, value in family.expect.items():
        assert getattr(models.cfg, name) == value
    for logits in states(models):
        if logits is not None:
            assert logits.isfinite().all()
            assert (logits[1:] - logits[:-1]).abs().amax(-1).min() > 0.1
    assert (states(models)[1] is not None) == family.nextn


def test_a_model_without_nextn_says_in_one_line_that_it_decodes_plainly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kimi-K2 has no layer to draft with: no error, no silence."""
    config = FAMILIES["Kimi-K2"].config_json() | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = {"max_model_len": 32, "num_pages": 8, "page_size": 16, "max_running_requests": 1}
    Engine.from_config(tmp_path, EngineConfig(device="cpu", dtype="float32", load_format="dummy", **small))
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [f"{tmp_path} has no NextN layer: decoding runs without speculation"]


def test_the_full_configuration_of_v3_is_the_published_checkpoint() -> None:
    """Names, shapes and dtypes of a whole FP8 checkpoint add up to the figures of the original."""
    cfg = ModelConfig.from_dict(json.loads((DATA / "dsv3-full.json").read_text()))
    tensors = [tensor for _, group in plan_checkpoint(cfg, "fp8") for tensor in group.values()]
    assert len(tensors) == 91_991
    assert sum(tensor.nbytes for tensor in tensors) == 688_574_839_360


# The NextN layer by itself


@pytest.fixture(scope="module", params=["fp8", "bf16", "fp32"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its NextN layer, in several shards."""
    path: Path = tmp_path_factory.mktemp("target") / "model"
    write_random_checkpoint(small_config(), path, stored_as=request.param, shard_size=10**6)
    return path


@pytest.fixture(scope="module")
def fp8_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The FP8 one, in one file."""
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_random_checkpoint(small_config(), path)
    return path


def as_sglang_first_did(draft: Path) -> None:
    """The first exports had copies of embedding and head; other values show that nobody reads them."""
    file = draft / "nextn_layer_parameters.safetensors"
    copies = {f"model.layers.0.{name}": torch.zeros(512, 256) for name in NEXTN_COPIES}
    save_file(load_file(file) | copies, file)
    write_map(draft, list(load_file(file)))


def as_sglang_does(draft: Path) -> None:
    """Without the copies; the index is a weight_map alone; quantization_config stays whatever the dtype."""
    write_map(draft, list(load_file(draft / "nextn_layer_parameters.safetensors")))
    config = json.loads((draft / "config.json").read_text()) | {"quantization_config": fp8()}
    (draft / "config.json").write_text(json.dumps(config))


def without_index(draft: Path) -> None:
    (draft / "model.safetensors.index.json").unlink()


def write_map(draft: Path, names: list[str]) -> None:
    table = {"weight_map": dict.fromkeys(names, "nextn_layer_parameters.safetensors")}
    (draft / "model.safetensors.index.json").write_text(json.dumps(table))


@pytest.mark.parametrize("form", [keep, as_sglang_first_did, as_sglang_does, without_index])
def test_an_exported_layer_drafts_as_the_one_in_the_checkpoint(
    target: Path, tmp_path: Path, form: Callable[[Any], None]
) -> None:
    """Whatever its form and dtype, logits of target and draft are bit for bit the same."""
    draft = tmp_path / "draft"
    export_nextn(target, draft, progress=False)
    form(draft)
    for own, exported in zip(states(build(target)), states(build(target, draft)), strict=True):
        assert own is not None
        assert exported is not None
        assert_close(exported, own, "bitwise")


def test_a_bf16_draft_serves_an_fp8_target(fp8_target: Path, tmp_path: Path) -> None:
    """Target and draft may be stored differently: the layer is what its own files say."""

    def plain(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
            tensors[name] = reference(tensors, name).bfloat16()
            del tensors[f"{name}_scale_inv"]

    export_nextn(fp8_target, tmp_path / "draft", progress=False)
    draft = rewrite(tmp_path / "draft", tmp_path / "plain", plain)
    models, own = build(fp8_target, draft), build(fp8_target)
    assert_close(states(models)[0], states(own)[0], "bitwise")
    assert models.nextn is not None
    assert own.nextn is not None
    mine = dict(models.nextn.named_parameters())
    for name, value in own.nextn.named_parameters():
        wide = name.endswith("e_score_correction_bias")  # float32 in any checkpoint
        assert_close(mine[name], value if wide else value.bfloat16().float(), "bitwise", what=name)


# Files of transformers


HF = {
    "V3": Family({"num_nextn_predict_layers": 0}, ("quantization_config",), "fp32"),
    "Kimi-K2": Family(KIMI | {"model_type": "deepseek_v3"}, ("quantization_config",), "fp32"),
    "V2-Lite": Family(V2_LITE, V2_ONLY, "fp32"),
}


@pytest.mark.parametrize("name", HF)
def test_transformers_computes_the_same_logits_from_the_same_files(name: str, tmp_path: Path) -> None:
    """A checkpoint written here loads in transformers; saved again by it, it loads here; all logits agree."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

    config = HF[name].config_json()
    write_random_checkpoint(config, tmp_path / "ours", stored_as="fp32")
    kind = DeepseekV2ForCausalLM if name.startswith("V2") else DeepseekV3ForCausalLM
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = kind.from_pretrained(tmp_path / "ours", **options).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    ours = states(build(tmp_path / "ours"))[0]
    assert_close(ours, theirs, "fp32-logits")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="1MB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert_close(states(build(tmp_path / "theirs"))[0], ours, "bitwise")


# What is refused


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "V3.2": (
        {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
        r"'deepseek_v32' uses sparse attention.* nextn runs DeepSeek-V2-Lite, V2, V3, R1, V3\.1 and Kimi-K2",
    ),
    "GLM-5": (
        {"model_type": "glm_moe_dsa", "index_topk": 2048},
        "'glm_moe_dsa' uses sparse attention.* nextn runs",
    ),
    "Kimi-K2.5": (
        {"model_type": "kimi_k25", "text_config": KIMI},
        "'kimi_k25' nests a text_config.* nextn runs",
    ),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' is not supported.*bf16"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' is not supported.*bf16"),
    "NVFP4": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        r"'modelopt' \(NVFP4\) is not supported.*: use the model's original checkpoint",
    ),
    "INT4": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        r"'compressed-tensors' \(pack-quantized\) is not supported.*: use the model's original",
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "'bitsandbytes' is not supported.*: use",
    ),
    "FP8 a tensor": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        r"one scale a tensor \(no weight_block_size\) is not supported.*: use",
    ),
    "E5M2": ({"quantization_config": fp8(fmt="e5m2")}, "FP8 of the format 'e5m2' is not supported.*: use"),
    "static": (
        {"quantization_config": fp8(activation_scheme="static")},
        "activation_scheme 'static' is not supported.*: use",
    ),
    "two thetas": (modern(rope_theta=50000.0), "gives rope_theta twice, as 10000 and 50000.0; keep one"),
    "attention_factor": (
        {"rope_scaling": YARN | {"attention_factor": 1.2}},
        "sets attention_factor or truncate, which nextn does not read",
    ),
}


def assert_one_sentence(error: CheckpointError) -> None:
    text = str(error)
    assert "\n" not in text
    assert not text.endswith(".")
    assert len(text) < 400


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_an_unsupported_model_is_refused_by_its_config(name: str, tmp_path: Path) -> None:
    """One sentence with the reason and what would do, before any tensor is looked for."""
    change, text = REFUSED_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(small_config(**change)))
    with pytest.raises(CheckpointError, match=text) as caught:
        build(tmp_path)
    assert_one_sentence(caught.value)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe", "llama"])
def test_models_without_mla_are_refused(kind: str, tmp_path: Path) -> None:
    """Grouped-query attention has no latent."""
    config = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"'{kind}' has no kv_lora_rank: .* nextn runs") as caught:
        build(tmp_path)
    assert_one_sentence(caught.value)


def test_no_theta_is_no_guess(tmp_path: Path) -> None:
    """What changes the computation has no default."""
    config = small_config()
    del config["rope_theta"]
    with pytest.raises(CheckpointError, match="lacks 'rope_theta'"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"quantization": {"quant_algo": "NVFP4"}}', "NVFP4"),
        ("{}", "an algorithm that it does not name"),
        ("{", "an algorithm that it does not name"),
    ],
)
def test_a_quantisation_named_in_a_file_beside_the_config_is_refused(
    content: str, what: str, tmp_path: Path
) -> None:
    """ModelOpt's exports say it in hf_quant_config.json, and config.json may be silent."""
    config = small_config()
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"'modelopt' \({what}\) is not supported"):
        build(tmp_path)


def packed(*suffixes: str, codes: bool = False) -> Callable[[Tensors], None]:
    """Replace one weight by what another format stores of it."""

    def change(tensors: Tensors) -> None:
        name = "model.layers.1.mlp.experts.0.up_proj.weight"
        del tensors[f"{name}_scale_inv"]
        stored = tensors.pop(name)
        if codes:
            tensors[name] = stored.view(torch.uint8)
        for suffix in suffixes:
            tensors[name.removesuffix(".weight") + suffix] = torch.zeros(4, 4)

    return change


FOREIGN: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "NVFP4": (packed(".input_scale", ".weight_scale", ".weight_scale_2", codes=True), r"NVFP4 \(.*_2\)"),
    "INT4": (packed(".weight_packed", ".weight_scale", ".weight_shape"), r"4-bit compressed-tensors \("),
    "GPTQ": (packed(".qweight", ".qzeros", ".scales", ".g_idx"), r"GPTQ or AWQ \(.*\.qweight\)"),
    "FP8 a tensor": (packed(".weight_scale", codes=True), r"FP8 with one scale a tensor or channel \("),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_an_unsupported_format_is_refused_by_its_tensors(name: str, fp8_target: Path, tmp_path: Path) -> None:
    """Where config.json does not tell, tensor names do: one sentence instead of thousands of faults."""
    change, text = FOREIGN[name]
    path = rewrite(fp8_target, tmp_path / "foreign", change)
    with pytest.raises(
        CheckpointError, match=f"in a format that nextn does not read: {text}.*; use"
    ) as caught:
        build(path)
    assert_one_sentence(caught.value)


def test_requantised_values_are_close_to_what_they_were() -> None:
    """The helper above really quantises: a power-of-two scale costs at most a step of e4m3."""
    weight, scale = quantize_blocks(torch.randn(130, 200), (128, 128))
    tensors = {"w": weight, "w_scale_inv": scale}
    before = reference(tensors, "w")
    with_ue8m0_values(tensors)
    assert (tensors["w_scale_inv"].log2() % 1 == 0).all()
    assert (reference(tensors, "w") - before).abs().max() < before.abs().max() / 16
