"""Builds the target and its NextN layer and fills them: from a checkpoint, or with random weights.

The NextN layer's weights come from the main checkpoint (layer `num_hidden_layers`) or from a draft
directory: an exported layer, with or without copies of the embedding and the head, or another full
checkpoint of the same model. The embedding and the head are always the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nextn.config import EngineConfig, ModelConfig
from nextn.errors import CapacityError, CheckpointError
from nextn.kernels.comm import SINGLE, TensorParallel
from nextn.models.checkpoint import Checkpoint, shorten
from nextn.models.deepseek import DeepseekModel
from nextn.models.dummy import fill_dummy
from nextn.models.loader import load_checkpoint
from nextn.models.mtp import NextN
from nextn.models.progress import format_bytes
from nextn.models.specs import TensorSpec

logger = logging.getLogger(__name__)

NEXTN_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that a NextN layer may have of its own on disk although they repeat the target's."""

_DRAFT_FIELDS = (
    "vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "scoring_func", "topk_method", "weight_block_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Models:
    """The target, its NextN layer (None: nothing to draft with, or not asked for) and the target's config."""

    target: DeepseekModel
    nextn: NextN | None
    cfg: ModelConfig


@dataclass(frozen=True, slots=True)
class _Draft:
    """Where the NextN layer's tensors lie: a directory, and the layer's index in its names.

    exported: the directory holds this layer alone, so anything else in it is left over.
    """

    path: Path
    layer: int
    exported: bool


def build_models(
    model_dir: Path | None,
    cfg: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    *,
    tp: TensorParallel = SINGLE,
    keep_fp8: bool | None = None,
    progress: bool = True,
) -> Models:
    """Build and fill the models that `config` asks for.

    model_dir: the target's checkpoint; may be None with load_format 'dummy' only. `nextn` is None when
    config.spec is None, or when the checkpoint has no NextN layer and no config.draft_model is given.
    keep_fp8: keep FP8 weights as they are; otherwise they are dequantised to `dtype` once. The default keeps
    them on CUDA, and not on a CPU, where products of dequantised weights are faster.
    Raises `CheckpointError` for weights that do not fit, `CapacityError` when the device's memory is full.
    """
    if cfg.is_exported_draft:
        raise CheckpointError(
            f"{model_dir} holds an exported NextN layer, not a model; give the model's directory, and this "
            "one as --draft-model"
        )
    keep = device.type == "cuda" if keep_fp8 is None else keep_fp8
    draft = _find_draft(model_dir, cfg, config)
    dummy = config.load_format == "dummy"
    fp8 = (keep, keep) if dummy else _keeps_fp8(keep, cfg, _require_dir(model_dir), draft)
    try:
        target = DeepseekModel(
            cfg, dtype=dtype, device=device, keep_fp8=fp8[0], max_positions=max_positions, tp=tp
        )
        nextn = NextN(cfg, target, dtype=dtype, device=device, keep_fp8=fp8[1], tp=tp) if draft else None
        models = Models(target, nextn, cfg)
        if dummy:
            specs, block_size = _all_specs(models), cfg.weight_block_size
            fill_dummy(
                specs, seed=config.seed, device=device, dtype=dtype, keep_fp8=keep, block_size=block_size
            )
        else:
            _load(models, _require_dir(model_dir), draft, progress)
    except torch.OutOfMemoryError as error:
        raise _capacity_error(device, error) from None
    return models


def meta_models(cfg: ModelConfig) -> tuple[DeepseekModel, NextN | None]:
    """The modules of `cfg` without storage: the table of the checkpoint's names and shapes."""
    meta = torch.device("meta")
    target = DeepseekModel(cfg, dtype=torch.bfloat16, device=meta, keep_fp8=True, max_positions=1)
    if not cfg.has_nextn:
        return target, None
    return target, NextN(cfg, target, dtype=torch.bfloat16, device=meta, keep_fp8=True)


def nextn_specs(nextn: NextN, cfg: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """The NextN layer's specs with names that start with `model.layers.{layer}.`, as they are on disk."""
    own, prefix = layer_prefix(cfg.nextn_layer), layer_prefix(layer)
    for spec in nextn.specs():
        assert spec.name.startswith(own), spec.name
        yield replace(spec, name=prefix + spec.name.removeprefix(own))


def layer_prefix(layer: int) -> str:
    """Prefix of a layer's tensor names, with its closing dot: layer 1 is not layer 10."""
    return f"model.layers.{layer}."


def copy_names(layer: int) -> dict[str, str]:
    """Names of the copies that layer `layer` may have, and of the target's tensors that they repeat."""
    originals = ("model.embed_tokens.weight", "lm_head.weight")
    return {layer_prefix(layer) + copy: own for copy, own in zip(NEXTN_COPIES, originals, strict=True)}


def require_layer(path: Path, layer: int) -> None:
    """Refuse a checkpoint that announces a NextN layer and was shipped without any tensor of it."""
    prefix = layer_prefix(layer)
    names = Checkpoint(path).names()
    if not any(name.startswith(prefix) for name in names):
        layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
        held = shorten(sorted(layers, key=lambda text: (len(text), text)), most=8) or "none"
        raise CheckpointError(
            f"{path} announces a NextN layer but holds no tensor named {prefix}* (layers found: {held}); run "
            "it without (--spec off) or name a directory that has the layer (--draft-model)"
        )


def is_ignored(name: str) -> bool:
    """Whether a tensor is one that older checkpoints carry and no model reads."""
    return name.endswith("rotary_emb.inv_freq")


def check_draft_config(target: ModelConfig, draft: ModelConfig, path: Path) -> None:
    """Raise `CheckpointError` unless a draft directory's config.json describes a layer of this target."""
    different = [
        f"{name} is {getattr(draft, name)} instead of {getattr(target, name)}"
        for name in _DRAFT_FIELDS
        if getattr(draft, name) != getattr(target, name)
    ]
    if different:
        raise CheckpointError(f"{path} is not a draft for this model: {', '.join(different)}")


def _all_specs(models: Models) -> Iterable[TensorSpec]:
    yield from models.target.specs()
    if models.nextn is not None:
        yield from models.nextn.specs()


def _require_dir(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise CheckpointError("a model directory is needed unless --load-format is dummy")
    return model_dir


def _find_draft(model_dir: Path | None, cfg: ModelConfig, config: EngineConfig) -> _Draft | None:
    """Where to take the NextN layer from, or None when it is not asked for or does not exist."""
    if config.spec is None:
        return None
    if config.draft_model is None:
        # Random weights need no directory; the path is then never opened.
        return _Draft(model_dir or Path(), cfg.nextn_layer, False) if cfg.has_nextn else None
    path = Path(config.draft_model)
    draft = ModelConfig.from_dir(path)
    if not draft.is_exported_draft and not draft.has_nextn:
        raise CheckpointError(f"{path} has no NextN layer to draft with (num_nextn_predict_layers is 0)")
    if draft.weight_block_size != cfg.weight_block_size and not _has_scales(path):
        draft = replace(draft, weight_block_size=cfg.weight_block_size)  # there is nothing in blocks
    check_draft_config(cfg, draft, path)
    return _Draft(path, draft.nextn_layer, draft.is_exported_draft)


def _has_scales(path: Path) -> bool:
    return any(name.endswith("_scale_inv") for name in Checkpoint(path).names())


def _keeps_fp8(keep: bool, cfg: ModelConfig, model_dir: Path, draft: _Draft | None) -> tuple[bool, bool]:
    """Whether to allocate FP8 for the target and for the NextN layer: only where the files hold scales.

    A module that has FP8 and meets another dtype reallocates itself, which this spares whole bf16 models.
    """
    own = layer_prefix(cfg.num_hidden_layers)
    target = any(
        name.endswith("_scale_inv") and not name.startswith(own) for name in Checkpoint(model_dir).names()
    )
    if draft is None:
        return keep and target, False
    prefix = layer_prefix(draft.layer)
    layer = any(
        name.endswith("_scale_inv") and name.startswith(prefix) for name in Checkpoint(draft.path).names()
    )
    return keep and target, keep and layer


def _load(models: Models, model_dir: Path, draft: _Draft | None, progress: bool) -> None:
    """Load target and NextN layer: in one pass where they lie in one directory."""
    cfg = models.cfg
    own = layer_prefix(cfg.num_hidden_layers)
    specs = list(models.target.specs())
    if models.nextn is None or draft is None:
        _read(model_dir, specs, lambda name: name.startswith(own), models, progress)
        return
    require_layer(draft.path, draft.layer)
    extra = list(nextn_specs(models.nextn, cfg, draft.layer))
    prefix = layer_prefix(draft.layer)
    copies = copy_names(draft.layer)
    if draft.path.resolve() == model_dir.resolve():
        _read(model_dir, specs + extra, lambda name: name in copies, models, progress)
        return
    _read(model_dir, specs, lambda name: name.startswith(own), models, progress)

    def is_other(name: str) -> bool:
        return name in copies or (not draft.exported and not name.startswith(prefix))

    _read(draft.path, extra, is_other, models, progress)


def _read(
    path: Path, specs: list[TensorSpec], skip: Callable[[str], bool], models: Models, progress: bool
) -> None:
    report = load_checkpoint(
        path,
        specs,
        skip=lambda name: is_ignored(name) or skip(name),
        block_size=models.cfg.weight_block_size,
        device=models.target.place.device,
        progress=progress,
    )
    logger.debug(
        "%s: %d tensors (%d FP8), %s in %.1f s",
        path.name, report.tensors, report.fp8_tensors, format_bytes(report.nbytes), report.seconds,
    )  # fmt: skip


def _capacity_error(device: torch.device, error: torch.OutOfMemoryError) -> CapacityError:
    """Say how full the device is, in GB."""
    free, total = torch.cuda.mem_get_info(device)
    return CapacityError(
        f"the model does not fit into the memory of {device}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are "
        f"free ({str(error).splitlines()[0]}); use a smaller model"
    )
