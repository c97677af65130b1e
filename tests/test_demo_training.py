"""The demo trainer's mathematics and export format against transformers, on a tiny random model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

TINY = {
    "vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 256, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "original_positions": 64, "yarn_factor": 8.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    """scripts/demo_model.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "scripts")
        return importlib.import_module("demo_model")


@pytest.fixture(scope="module")
def model(trainer: ModuleType) -> torch.nn.Module:
    """A random model with everything away from its initial value."""
    torch.manual_seed(0)
    model = trainer.Model(trainer.Config(**TINY))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * 0.08)
            if "gate.weight" in name:
                p.mul_(4)
        for router in model.routers():
            router.e_score_correction_bias.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def exported(trainer: ModuleType, model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint directory."""
    path = tmp_path_factory.mktemp("exported")
    trainer.export(model, path, path)
    return path


@pytest.fixture(scope="module")
def oracle(trainer: ModuleType, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """transformers' model of the same checkpoint, dequantised."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("plain")
    config = json.loads((exported / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(exported / "model.safetensors")
    plain = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            plain[name] = trainer.dequantize_blocks(tensor, tensors[f"{name}_scale_inv"])
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor.float()
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    cls = transformers.DeepseekV3ForCausalLM
    cls._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{TINY['num_hidden_layers']}\..*"]
    return cls.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def test_the_target_computes_what_transformers_computes(
    trainer: ModuleType, model: torch.nn.Module, oracle: torch.nn.Module
) -> None:
    """States and logits agree in float32 on the exported values, beyond YaRN's original length too."""
    own = trainer.deployed(model, torch.float32)
    ids = torch.randint(0, TINY["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states, _ = own.target(ids, trainer.rope_table(own.config, 100, ids.device))
        theirs = oracle(ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(states, theirs.hidden_states[-1], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(own.lm_head(states), theirs.logits, atol=2e-4, rtol=2e-4)


def test_the_nextn_layer_computes_what_transformers_computes(
    trainer: ModuleType, model: torch.nn.Module, oracle: torch.nn.Module
) -> None:
    """The training pass and each recycled draft step agree with transformers' MTP layer."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    mtp = modeling.MtpModel.from_pretrained(oracle).eval()
    seen: list[torch.Tensor] = []
    mtp.layers[0].register_forward_hook(lambda module, args, out: seen.append(out))

    def theirs(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, tokens.shape[1] + 1)[None]
        mtp(input_ids=tokens, last_hidden_states=states, attention_mask=torch.ones_like(tokens),
            position_ids=position, mtp_cache=None)  # fmt: skip
        return seen[-1]

    own, length, row = trainer.deployed(model, torch.float32), 40, 17
    rope = trainer.rope_table(own.config, length + 3, torch.device("cpu"))
    ids = torch.randint(0, TINY["vocab_size"], (1, length + 1), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states, _ = own.target(ids[:, :-1], rope[:, :length])
        expected = theirs(ids[:, 1:], states)
        got, _ = own.draft(states, ids[:, 1:], rope[:, :length])
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        extended, recycled = states[:, : row + 1], states
        for s in range(3):
            embedding = own.embed_tokens(ids[:, :-1].roll(-s - 1, 1))
            recycled, k, v = own.nextn.draft(embedding, recycled, rope[:, s : s + length], keys, values)
            keys, values = [*keys, k], [*values, v]
            reference = theirs(ids[:, 1 : row + 2 + s], extended)[:, -1]
            torch.testing.assert_close(recycled[:, row], reference, atol=2e-4, rtol=2e-4)
            extended = torch.cat([extended, recycled[:, row : row + 1]], 1)


def test_cached_generation_follows_the_full_pass(trainer: ModuleType, model: torch.nn.Module) -> None:
    """Greedy text of the cached loop is the argmax of the uncached pass at every step."""
    own = trainer.deployed(model, torch.float32)
    prompts = [[0, 5, 9], [0, 7, 7, 8, 30, 2, 11]]
    ids = trainer.generate(own, prompts, 24, torch.zeros(2), torch.Generator().manual_seed(0))
    rope = trainer.rope_table(own.config, 24, ids.device)
    with torch.no_grad():
        choice = own.lm_head(own.target(ids, rope)[0]).argmax(-1)
    for row, prompt in enumerate(prompts):
        written = ids[row].tolist()
        end = written.index(1) if 1 in written else 23
        assert written[: len(prompt)] == prompt
        assert written[len(prompt) : end] == choice[row, len(prompt) - 1 : end - 1].tolist()


def test_export_has_the_official_names_dtypes_and_scales(exported: Path) -> None:
    """FP8 weights have a float32 scale a 128x128 block; norms, router, embeddings, eh_proj are bfloat16."""
    tensors = load_file(exported / "model.safetensors")
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            assert tensor.dtype == torch.float8_e4m3fn
            assert scale.dtype == torch.float32
            assert scale.shape == tuple(-(-n // 128) for n in tensor.shape)
        elif not name.endswith("_scale_inv"):
            assert tensor.dtype == (torch.float32 if name.endswith("bias") else torch.bfloat16), name
    nextn = {name.removeprefix("model.layers.3.") for name in tensors if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= nextn
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in nextn)
    experts = {name.split(".")[5] for name in tensors if ".mlp.experts." in name}
    assert experts == {str(e) for e in range(8)}
    assert len(tensors) == 3 + 20 + 3 * (14 + 2 + 9 * 6) + 4


def test_rounding_is_idempotent_and_close(trainer: ModuleType) -> None:
    """A short last block is padded; rounding a rounded weight changes nothing; the error is an FP8 step."""
    weight = torch.randn(160, 256, generator=torch.Generator().manual_seed(3))
    codes, scale = trainer.quantize_blocks(weight)
    once = trainer.dequantize_blocks(codes, scale)
    again, _ = trainer.quantize_blocks(once)
    assert scale.shape == (2, 2)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert ((once - weight).abs() <= weight.abs() / 16 + scale.max() / 64).all()


def test_an_exported_checkpoint_is_read_back_as_it_was_written(trainer: ModuleType, tmp_path: Path) -> None:
    """Training can start from an export: reading it and writing it again gives the same values."""
    config = trainer.Config(**TINY)
    first, second = trainer.Model(config), trainer.Model(config)
    trainer.export(first, tmp_path, tmp_path / "out")
    trainer.load_export(second, tmp_path / "out")
    left, right = trainer.checkpoint_tensors(first), trainer.checkpoint_tensors(second)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        if name.endswith("_scale_inv"):
            torch.testing.assert_close(right[name], tensor, rtol=1e-6, atol=0)
        else:
            assert torch.equal(right[name].float(), tensor.float()), name


def test_only_what_would_repeat_generated_text_is_struck_out(trainer: ModuleType) -> None:
    """A token is forbidden exactly where it completes an n-gram that was generated before."""
    loop = torch.tensor([[0, *([5, 6, 7, 8] * 5)], list(range(21))])
    given, n = torch.tensor([3, 3]), 6
    row, at, token = trainer.repeats(loop, given, n)
    expected = {
        (b, t, int(loop[b, s + 1]))
        for b in range(2)
        for t in range(n - 2, 21)
        for s in range(n - 2, t)
        if s + 1 >= given[b] and loop[b, s - n + 2 : s + 1].equal(loop[b, t - n + 2 : t + 1])
    }
    assert set(zip(row.tolist(), at.tolist(), token.tolist(), strict=True)) == expected
    assert expected


def test_generation_without_repeats_holds_no_ngram_twice(trainer: ModuleType, model: torch.nn.Module) -> None:
    """With no_repeat = 3, no 3-gram of the written part comes twice; without it the same prompt loops."""
    own = trainer.deployed(model, torch.float32)

    def repeated(no_repeat: int) -> int:
        ids = trainer.generate(
            own, [[0, 5, 9]], 96, torch.zeros(1), torch.Generator().manual_seed(0), no_repeat
        )
        row = ids[0, 3:].tolist()
        row = row[: row.index(1)] if 1 in row else row
        grams = list(zip(row, row[1:], row[2:], strict=False))
        return len(grams) - len(set(grams))

    assert repeated(0) > repeated(3) == 0
