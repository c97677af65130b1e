"""Small checkpoints for tests: written once for a file of tests, then copied and damaged on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextn.config import ModelConfig
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.models.deepseek import DeepseekModel
from nextn.models.mtp import NextN
from nextn.models.specs import TensorSpec

OTHER_FILES = {"tokenizer.json": "{}", "modeling_deepseek.py": "# code", "generation_config.json": "{}"}
"""What lies beside the weights of a checkpoint, by name."""

DATA = Path(__file__).parent.parent / "data"
Tensors = dict[str, Tensor]
Loaded = dict[str, tuple[Tensor, Tensor | None]]


@pytest.fixture(autouse=True)
def small_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a reader little memory of its own, in a module that imports this.

    Its pages cost nothing unused, but tests fill all new memory.
    """
    monkeypatch.setattr("nextn.models.reader.KEPT_BYTES", 1 << 20)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a 4-layer model with 16 experts and a NextN layer."""
    config: dict[str, Any] = json.loads((DATA / "dsv3-tiny.json").read_text())
    return config | changes


def small_config(**changes: Any) -> dict[str, Any]:
    """The same with two layers and four experts, for tests that need few tensors."""
    few = {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    return tiny_config(**few | {"num_experts_per_tok": 2} | changes)


def read_all(path: Path) -> Tensors:
    """Every tensor of a directory, whichever file it lies in."""
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def snapshot(directory: Path) -> dict[str, bytes]:
    """A directory's files and their bytes."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def rewrite(source: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint as one file, after `change` has edited its tensors in place."""
    tensors = read_all(source)
    change(tensors)
    return write(out, tensors, (source / "config.json").read_text())


def write(out: Path, tensors: Tensors, config: str | None = None) -> Path:
    """One safetensors file and, if given, config.json."""
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    if config is not None:
        (out / "config.json").write_text(config)
    return out


def reference(tensors: Tensors, name: str, block: int = 128) -> Tensor:
    """One tensor in float32, FP8 dequantised element block by element block, the plainest way there is."""
    weight = tensors[name].float()
    if f"{name}_scale_inv" not in tensors:
        return weight
    scale = tensors[f"{name}_scale_inv"].float()
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            rows = slice(row * block, (row + 1) * block)
            columns = slice(column * block, (column + 1) * block)
            weight[rows, columns] *= scale[row, column]
    return weight


def specs_of(config: dict[str, Any], *, nextn: bool = True, tp: TensorParallel = SINGLE) -> list[TensorSpec]:
    """The real modules' specs, which load into nothing."""
    cfg, meta = ModelConfig.from_dict(config), torch.device("meta")
    target = DeepseekModel(cfg, dtype=torch.float32, device=meta, keep_fp8=True, max_positions=1, tp=tp)
    specs = list(target.specs())
    if nextn:
        specs += NextN(cfg, target, dtype=torch.float32, device=meta, keep_fp8=True, tp=tp).specs()
    return specs


def capturing(specs: Iterable[TensorSpec]) -> tuple[list[TensorSpec], Loaded]:
    """The same specs, loading into a dict instead: name to (weight, scale). A second load of a name fails."""
    got: Loaded = {}

    def taker(name: str) -> Callable[[Tensor, Tensor | None], None]:
        def take(weight: Tensor, scale: Tensor | None) -> None:
            assert name not in got, f"{name} was loaded twice"
            got[name] = (weight.clone(), None if scale is None else scale.clone())

        return take

    return [replace(spec, load=taker(spec.name)) for spec in specs], got
