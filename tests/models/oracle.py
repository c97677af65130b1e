"""transformers' DeepSeek models and its MTP layer, filled in memory with a tiny model's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from tests.models.build import Tiny


def target_model(config: dict[str, Any], tiny: Tiny) -> nn.Module:
    """transformers' model of the same config.json and weights, in float32."""
    v2 = config.get("model_type") == "deepseek_v2"
    kind, options = (
        (DeepseekV2ForCausalLM, DeepseekV2Config) if v2 else (DeepseekV3ForCausalLM, DeepseekV3Config)
    )
    cfg = options(**config, attn_implementation="eager")
    cfg.dtype = torch.float32
    model: nn.Module = kind(cfg).eval().requires_grad_(False)
    nextn = f"model.layers.{tiny.cfg.num_hidden_layers}."
    model.load_state_dict(_fuse({k: v for k, v in tiny.state.items() if not k.startswith(nextn)}))
    return model


def logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits of one sequence.  # [n, vocab]"""
    out: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return out


class MtpOracle:
    """transformers' MtpModel, which computes whole sequences and exposes only its last row's logits."""

    def __init__(self, config: dict[str, Any], tiny: Tiny) -> None:
        self.model = target_model(config, tiny)
        self.mtp = MtpModel(self.model, 1).eval().requires_grad_(False)
        self.mtp.layers[0].load_state_dict(_mtp_state(tiny))
        self.states: Tensor | None = None
        self.mtp.layers[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.states = output

    def hidden(self, tokens: list[int]) -> Tensor:
        """The target's states after its final norm.  # [n, hidden]"""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        states: Tensor = out.hidden_states[-1][0]
        return states

    def rows(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """States after shared_head.norm of the pairs (hidden[i], tokens[i]).  # [n, hidden]"""
        ids = torch.tensor([tokens])
        positions = torch.arange(1, len(tokens) + 1)[
            None
        ]  # one more than ours, which no product of rope sees
        self.mtp(ids, hidden[None], torch.ones_like(ids), positions, None)
        assert self.states is not None
        return self.states[0]

    def draft(self, tokens: list[int], root: int, path: list[int]) -> Tensor:
        """Draft logits after root and each token of a path, states recycled.  # [1 + path, vocab]"""
        hidden, shifted = self.hidden(tokens), [*tokens[1:], root]
        for token in path:
            hidden = torch.cat((hidden, self.rows(shifted, hidden)[-1:]))
            shifted.append(token)
        out: Tensor = self.model.lm_head(self.rows(shifted, hidden)[len(tokens) - 1 :])
        return out


def _mtp_state(tiny: Tiny) -> dict[str, Tensor]:
    """The NextN layer's tensors under the names of transformers' MTP layer."""
    prefix = f"model.layers.{tiny.cfg.num_hidden_layers}."
    own = {"enorm.weight": "", "hnorm.weight": "", "eh_proj.weight": "", "shared_head.norm.weight": ""}
    out: dict[str, Tensor] = {}
    for name, tensor in tiny.state.items():
        if name.startswith(prefix):
            short = name.removeprefix(prefix)
            out[short if short in own else f"mtp_block.{short}"] = tensor
    out["post_norm.weight"] = out.pop("shared_head.norm.weight")
    return _fuse(out)


def _fuse(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack each layer's experts, as transformers holds them in memory."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, marker, rest = name.partition(".experts.")
        if not marker:
            out[name] = tensor
        elif rest == "0.down_proj.weight":
            out[f"{prefix}.experts.down_proj"] = _stack(state, prefix, "down_proj")
            halves = (_stack(state, prefix, "gate_proj"), _stack(state, prefix, "up_proj"))
            out[f"{prefix}.experts.gate_up_proj"] = torch.cat(halves, 1)
    return out


def _stack(state: dict[str, Tensor], prefix: str, kind: str) -> Tensor:
    """One projection of all experts.  # [E, out, in]"""
    count = sum(name.startswith(f"{prefix}.experts.") and name.endswith(f".{kind}.weight") for name in state)
    return torch.stack([state[f"{prefix}.experts.{expert}.{kind}.weight"] for expert in range(count)])
