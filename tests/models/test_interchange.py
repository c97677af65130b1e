"""Files that pass between nextn and transformers, both ways, target and draft: whoever reads them, one model.

test_families.py sends each family through both; here are the dtypes and layouts of files, a model that began
its life in transformers, and the NextN layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nextn.models.convert import convert_checkpoint
from nextn.models.random_checkpoint import write_random_checkpoint
from tests.compare import assert_close
from tests.models.checkpoints import small_config
from tests.models.test_families import TOKENS, build, states

NEXTN_LAYER = r"model\.layers\.2\."
LAYOUTS = pytest.mark.parametrize("shard_size", [10**9, 10**6], ids=["one file", "shards"])


@pytest.fixture
def fp8_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers read FP8 on a CPU: it asks for the package accelerate, and then uses none of it."""
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True
    )


def count_files(path: Path) -> int:
    return len(list(path.glob("*.safetensors")))


def born_in_transformers() -> Any:
    """A target without a draft, made from transformers' own config, with values that are no default's."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    theirs = ("quantization_config", "architectures", "torch_dtype", "transformers_version")
    config = {name: value for name, value in small_config().items() if name not in theirs}
    config = DeepseekV3Config(**config | {"num_nextn_predict_layers": 0, "attn_implementation": "eager"})
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * noise)
        else:
            tensor.copy_(noise if "embed" in name else noise * tensor.shape[-1] ** -0.5)
    return model


def reload(path: Path) -> Any:
    """A checkpoint in transformers, computing in float32 whatever it is stored as."""
    from transformers import DeepseekV3ForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return DeepseekV3ForCausalLM.from_pretrained(path, **options).eval()


def target_logits(model: nn.Module) -> Tensor:
    """transformers' logits over TOKENS.  # [n, vocab]"""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def draft_logits(model: Any) -> Tensor:
    """Logits of all rows of transformers' MTP layer, which it reads from the target's directory itself.

    Its class looks for layer 61 alone unless it is told which one this checkpoint has.
    """
    from transformers.modeling_layers import MtpModel

    model._keys_to_ignore_on_load_unexpected = [NEXTN_LAYER]
    draft = MtpModel.from_pretrained(model).eval()
    kept: list[Tensor] = []
    draft.layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
        draft(tokens, hidden, torch.ones_like(tokens), torch.arange(len(TOKENS))[None], None)
        logits: Tensor = model.lm_head(kept[0])[0]
    return logits


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_that_transformers_saved_has_its_logits_here(
    tmp_path: Path, dtype: torch.dtype, shard_size: int
) -> None:
    """save_pretrained's names, dtypes, config and index are read, and what they mean is computed."""
    born_in_transformers().to(dtype).save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    assert (count_files(tmp_path / "saved") > 1) == (shard_size < 10**9)
    theirs = target_logits(reload(tmp_path / "saved"))
    assert theirs.std() > 0.3
    assert_close(states(build(tmp_path / "saved"))[0], theirs, "fp32-logits")


@LAYOUTS
@pytest.mark.parametrize("stored_as", ["fp8", "bf16", "fp32"])
def test_a_checkpoint_written_here_has_its_logits_in_transformers(
    tmp_path: Path, fp8_is_dequantised: None, stored_as: Any, shard_size: int
) -> None:
    """Target and NextN layer, copies and all: transformers reads both and computes the same."""
    write_random_checkpoint(small_config(), tmp_path / "made", stored_as=stored_as, shard_size=shard_size)
    assert (count_files(tmp_path / "made") > 1) == (shard_size < 10**9)
    model = reload(tmp_path / "made")
    target, draft = states(build(tmp_path / "made"))
    assert_close(target, target_logits(model), "fp32-logits", what="target")
    assert draft is not None
    assert_close(draft, draft_logits(model), "fp32-logits", what="draft")


@pytest.mark.parametrize(("stored_as", "dtype"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp32", "fp8")])
def test_a_converted_checkpoint_has_its_logits_in_transformers(
    tmp_path: Path, fp8_is_dequantised: None, stored_as: Any, dtype: Any
) -> None:
    """What config.json says after a conversion is what the tensors are: transformers goes by it alone."""
    write_random_checkpoint(small_config(), tmp_path / "made", stored_as=stored_as)
    convert_checkpoint(tmp_path / "made", tmp_path / "converted", dtype, shard_size=10**6, progress=False)
    model = reload(tmp_path / "converted")
    target, draft = states(build(tmp_path / "converted"))
    assert_close(target, target_logits(model), "fp32-logits", what="target")
    assert draft is not None
    assert_close(draft, draft_logits(model), "fp32-logits", what="draft")
