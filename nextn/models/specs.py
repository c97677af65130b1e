"""The contract between modules and whatever fills them: one `TensorSpec` a checkpoint tensor.

A module lists the tensors that it needs, by the checkpoint's own names, with their full shapes and the part
that this rank keeps; the loader, the dummy filler, the exporter and the checkpoint maker only see this list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["linear", "norm", "embedding", "bias", "gate"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint and where it goes.

    name: checkpoint name (`model.layers.3.self_attn.q_a_proj.weight`).
    shape: full, unsharded shape.
    kind: 'linear' tensors may be stored as block FP8 with a `<name>_scale_inv` beside them; others never are.
    load(weight, scale): takes this rank's part. `weight` is FP8 exactly when `scale` is given (float32, one
        value a block); otherwise it is bf16, fp16, fp32 or fp64 as on disk, and the module casts it. Both
        are copied, not kept: their memory holds the next tensor afterwards.
    shard: this rank's part, a slice for each dimension (whole slices on one rank).
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    load: Callable[[Tensor, Tensor | None], None]
    shard: tuple[slice, ...]

    @property
    def scale_name(self) -> str:
        """Name of the scale tensor that goes with an FP8 weight."""
        return f"{self.name}_scale_inv"
