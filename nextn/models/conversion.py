"""From one storage format to another, tensor by tensor: block FP8 to bf16 and back, streamed row by row.

Only what changes is converted; all else is copied byte for byte. A value that is not finite, in what is
written, is damage, and an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import Block, scale_shape
from nextn.models.checkpoint import StoredTensor
from nextn.models.fp8 import Scratch, dequantize_blocks, quantize_blocks
from nextn.models.loader import LoadItem
from nextn.models.output import NewFile, NewTensor
from nextn.models.reader import DTYPES, LargeRoom, Reader
from nextn.models.specs import TensorSpec

ConvertTo = Literal["keep", "bf16", "fp8"]
"""What becomes of weights."""

PIECE_BYTES = 4 << 20
"""Most bytes of a piece, on either side, unless one row of blocks has more."""

_KEPT_AS_STORED = ("e_score_correction_bias", "rotary_emb.inv_freq")  # float32 in every official format
_EXPONENTS = {
    "F8_E4M3": ("u1", 0x7F), "F8_E8M0": ("u1", 0xFF), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000), "F64": ("<u8", 0x7FF0_0000_0000_0000),
}  # fmt: skip
"""By dtype code: values as integers, and the bits that are all set in those that are not finite."""

_CHECKED_ITEMS = 1 << 17
"""Items that are looked at together: what the caches hold."""


class _Own(threading.local):
    """What each thread that converts has for itself: a way to files, and memory for the piece it makes."""

    def __init__(self) -> None:
        self.reader = Reader(torch.device("cpu"), LargeRoom())
        self.scratch = Scratch()


_own = _Own()


def quantizable(spec: TensorSpec) -> bool:
    """Whether official FP8 checkpoints store a tensor as FP8: every linear layer but eh_proj."""
    return spec.kind == "linear" and not spec.name.endswith(".eh_proj.weight")


def is_converted(weight: StoredTensor, dtype: ConvertTo, *, quantize: bool) -> bool:
    """Whether a weight's bytes change; otherwise it is copied, with its scale.

    An FP8 weight that official checkpoints do not have in FP8, which is eh_proj, becomes bf16 whatever the
    dtype: SGLang and vLLM have a plain layer there, and no place for a scale.
    """
    if weight.dtype == "F8_E4M3":
        return dtype == "bf16" or not quantize
    if dtype == "keep" or weight.name.endswith(_KEPT_AS_STORED):
        return False
    return weight.dtype != "BF16" or (dtype == "fp8" and quantize)


def converted_items(items: Iterable[LoadItem], dtype: ConvertTo) -> list[LoadItem]:
    """Those of a model's stored tensors whose bytes change."""
    return [item for item in items if is_converted(item.weight, dtype, quantize=quantizable(item.spec))]


def convert_item(name: str, item: LoadItem, dtype: ConvertTo, block_size: Block) -> list[NewTensor]:
    """A model's stored tensor as it is to be written under `name`, and its scale (`convert_tensor`)."""
    return convert_tensor(
        name, item.weight, item.scale, dtype, quantize=quantizable(item.spec), block_size=block_size
    )


def convert_tensor(
    name: str,
    weight: StoredTensor,
    scale: StoredTensor | None,
    dtype: ConvertTo,
    *,
    quantize: bool,
    block_size: Block,
) -> list[NewTensor]:
    """One tensor as it is to be written under `name`, and its scale (`name`_scale_inv) if that is FP8.

    scale: goes with an FP8 weight, and with no other. keep: the bytes as they are. bf16: FP8 times its scale
    is rounded to float32, then to bf16; other floats to bf16 at once. fp8: as bf16, but a float weight with
    `quantize` becomes e4m3 with float32 scales, and FP8 stays as it is. FP8 without `quantize` becomes bf16
    in each. Nothing is read until the pieces are asked for; they are whole rows of blocks. The correction
    bias is never changed.
    """
    assert (scale is not None) == (weight.dtype == "F8_E4M3"), f"{weight.name}: FP8 comes with a scale"
    if not is_converted(weight, dtype, quantize=quantize):
        copies = [copy_tensor(name, weight)]
        return copies if scale is None else [*copies, _copy_scale(f"{name}_scale_inv", scale)]
    if scale is not None:
        fp8 = scale  # a name that is not None in the closure
        return [NewTensor(name, "BF16", weight.shape, lambda: _dequantized(weight, fp8, block_size))]
    if dtype == "fp8" and quantize:
        quantized = Quantized(lambda: _quantized(weight, block_size))
        blocks = scale_shape(weight.shape[0], weight.shape[1], block_size)
        return [
            NewTensor(name, "F8_E4M3", weight.shape, quantized.codes),
            NewTensor(f"{name}_scale_inv", "F32", blocks, quantized.scales),
        ]
    return [NewTensor(name, "BF16", weight.shape, lambda: _rounded(weight))]


def copy_tensor(name: str, stored: StoredTensor) -> NewTensor:
    """A stored tensor's bytes under a new name."""
    return NewTensor(name, stored.dtype, stored.shape, lambda: _copied(stored))


def _copy_scale(name: str, scale: StoredTensor) -> NewTensor:
    """A scale's bytes under a new name, once they have been looked at."""

    def pieces() -> Iterator[memoryview]:
        _read_scale(scale)
        yield from _copied(scale)

    return NewTensor(name, scale.dtype, scale.shape, pieces)


def _read_scale(scale: StoredTensor) -> Tensor:
    """A whole scale in float32, which is finite and not negative."""
    with closing(_own.reader) as reader:
        return reader.read_scale(scale, [slice(0, size) for size in scale.shape])


def _copied(stored: StoredTensor) -> Iterator[memoryview]:
    room = _own.scratch.take("copy", (min(PIECE_BYTES, stored.nbytes),), torch.uint8)
    for piece in stored.chunks(room.numpy().data):
        _require_finite(piece, stored.dtype, stored)
        yield piece


def _dequantized(weight: StoredTensor, scale: StoredTensor, block_size: Block) -> Iterator[memoryview]:
    """An FP8 weight in bf16."""
    scales = _read_scale(scale)
    for first, rows in _row_pieces(weight, 2, block_size[0]):
        blocks = scales[first // block_size[0] :][: -(-len(rows) // block_size[0])]
        yield _bf16_bytes(dequantize_blocks(rows, blocks, block_size, torch.bfloat16, _own.scratch), weight)


def _rounded(weight: StoredTensor) -> Iterator[memoryview]:
    """A float tensor in bf16."""
    for _, rows in _row_pieces(weight, 2, 1):
        yield _bf16_bytes(_own.scratch.take("result", rows.shape, torch.bfloat16).copy_(rows), weight)


def _quantized(weight: StoredTensor, block_size: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """A float weight as FP8: codes and scales of some rows of blocks at a time."""
    for _, rows in _row_pieces(weight, 1, block_size[0]):
        codes, scale = quantize_blocks(rows, block_size, _own.scratch)
        _require_finite(bytes_of(codes), "F8_E4M3", weight)  # of an infinity comes a NaN too
        yield codes, scale


class Quantized:
    """An FP8 weight and its scales from one pass: that over the codes leaves the scales for who asks next.

    blocks: codes and scales from top to bottom; called once for both if the codes are asked for first.
    """

    def __init__(self, blocks: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        self._blocks = blocks
        self._scales: list[Tensor] = []

    def codes(self) -> Iterator[memoryview]:
        """The e4m3 codes."""
        self._scales = []
        for codes, scale in self._blocks():
            self._scales.append(scale)
            yield bytes_of(codes)

    def scales(self) -> Iterator[memoryview]:
        """The float32 scales."""
        scales, self._scales = self._scales or [scale for _, scale in self._blocks()], []
        return map(bytes_of, scales)


def _row_pieces(stored: StoredTensor, item_bytes: int, multiple: int) -> Iterator[tuple[int, Tensor]]:
    """A stored tensor's rows from top to bottom: the first row's index, and a multiple of `multiple` rows.

    item_bytes: bytes of an item of what they become. The rows lie in memory that the next ones use again.
    """
    width = math.prod(stored.shape[1:])
    row_bytes = max(1, width * max(item_bytes, DTYPES[stored.dtype].itemsize))
    step = max(1, PIECE_BYTES // (row_bytes * multiple)) * multiple
    nbytes = min(step, stored.shape[0]) * width * DTYPES[stored.dtype].itemsize
    columns = [slice(0, size) for size in stored.shape[1:]]
    with closing(_own.reader) as reader, reader.room(nbytes):
        for start in range(0, stored.shape[0], step):
            yield start, reader.read(stored, [slice(start, min(start + step, stored.shape[0])), *columns])


def _bf16_bytes(values: Tensor, weight: StoredTensor) -> memoryview:
    """A bf16 tensor's bytes, for a part of `weight`."""
    data = bytes_of(values)
    _require_finite(data, "BF16", weight)
    return data


def _require_finite(data: bytes | memoryview, dtype: str, weight: StoredTensor) -> None:
    """Raise `CheckpointError` if an infinity or a NaN is among values of this dtype."""
    if dtype in _EXPONENTS and len(data):
        view, exponent = _EXPONENTS[dtype]
        values = np.frombuffer(data, view)
        for start in range(0, len(values), _CHECKED_ITEMS):
            if (values[start : start + _CHECKED_ITEMS] & exponent).max() == exponent:
                raise CheckpointError(f"{weight.file}: {weight.name} holds values that are not finite")


def bytes_of(tensor: Tensor) -> memoryview:
    """A CPU tensor's bytes, not copied if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def config_for(
    config: Mapping[str, Any], files: Iterable[NewFile], converted: Sequence[LoadItem], dtype: ConvertTo
) -> dict[str, Any]:
    """config.json of a conversion. config: the source's. converted: what of it changes in `files`.

    A list of modules that are not quantised loses those that are, or hold one that is.
    """
    fp8 = [tensor.name for file in files for tensor in file.tensors if tensor.dtype == "F8_E4M3"]
    result = corrected_config(
        config,
        has_fp8=bool(fp8),
        dtype=None if dtype == "keep" else "bfloat16",
        new_scales=dtype == "fp8" and any(quantizable(item.spec) for item in converted),
    )
    quantization = result.get("quantization_config") or {}
    parents = {name.rsplit(".", count)[0] for name in fp8 for count in range(1, name.count(".") + 1)}
    for key, names in plain_modules(quantization).items():
        quantization[key] = [name for name in names if name not in parents]
    return result


def plain_modules(quantization: Mapping[str, Any]) -> dict[str, list[str]]:
    """The lists, in a quantization_config, of modules that are not quantised."""
    found = {key: quantization.get(key) for key in ("modules_to_not_convert", "ignored_layers")}
    return {
        key: names
        for key, names in found.items()
        if isinstance(names, list) and all(isinstance(name, str) for name in names)
    }


def corrected_config(
    config: Mapping[str, Any], *, has_fp8: bool, dtype: str | None, new_scales: bool = False
) -> dict[str, Any]:
    """config.json with a quantization_config exactly if some tensor is FP8.

    Readers that trust it would look for scales otherwise, or not look for any. new_scales: some scales were
    made anew in float32, so the field that says that all are powers of two goes. dtype: what torch_dtype
    (`dtype` in newer files) says of the other weights; None leaves it.
    """
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if has_fp8:
        result["quantization_config"] = _fp8_config(config.get("quantization_config") or {}, new_scales)
    if dtype is not None:
        fields = [name for name in ("torch_dtype", "dtype") if name in config] or ["torch_dtype"]
        result |= dict.fromkeys(fields, dtype)
    return result


def _fp8_config(given: Mapping[str, Any], new_scales: bool) -> dict[str, Any]:
    """The official quantization_config; what is given stays."""
    official = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    result = official | {"weight_block_size": [128, 128]} | dict(given)
    if new_scales:
        result.pop("scale_fmt", None)
    return result
