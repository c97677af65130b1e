"""Block FP8 on the host: quantising and dequantising whole weights fast, in little memory beside them.

PyTorch converts e4m3 on a CPU element by element. A code's bits moved into a float16 are the same number
times 2^-8, subnormals included, and float16 is widened by one instruction; the 2^8 goes into the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.gemm import FP8, Block, dequantize, scale_shape

FP8_MAX = 448.0

_FP16_SHIFT = 256.0  # e4m3 has an exponent bias of 7, float16 one of 15
_EXPONENT_TOP = 1 << 14  # a code's sign arrives here too when its byte is widened with its sign
_SMALLEST_SCALE = 2.0**-149  # of float32; by a scale of 0 nothing can be divided
_LARGEST_SCALE = 2.0**119  # times 2^8 it is still finite
_STEP_ITEMS = 1 << 19
"""Items of a step: what the caches hold."""

_SERIAL_ITEMS = 1 << 15
"""The same where PyTorch has several threads: what it does not split over them.

They would wait for each other at the end of each operation, on a busy machine for longer than it takes.
"""


class Scratch:
    """Memory that one thread uses again: a first write to a page costs more than what is done in it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor, until the same use asks for the next one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if use not in self._kept or self._kept[use].nbytes < nbytes:
            self._kept[use] = torch.empty(nbytes, dtype=torch.uint8)
        return self._kept[use][:nbytes].view(dtype).view(tuple(shape))


def quantize_blocks(
    weight: Tensor, block_size: Block, scratch: Scratch | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise `weight` [N, K] to e4m3 with one scale a block: amax / 448, or 1 for a block of zeros.

    Returns FP8 [N, K] and float32 scales [ceil(N / bn), ceil(K / bk)]; a short block has the scale of what
    it holds (the checkpoint format's own rule). Beside the results one row of blocks is in memory.
    scratch: has room for that and for the codes, which the next call with it overwrites.
    """
    rows, columns = weight.shape
    height, width = block_size
    shape = scale_shape(rows, columns, block_size)
    scale = torch.empty(shape, dtype=torch.float32, device=weight.device)
    room_shape = (2, min(height, rows), columns)
    if scratch is None:
        codes = torch.empty(rows, columns, dtype=FP8, device=weight.device)
        room = torch.empty(room_shape, dtype=torch.float32, device=weight.device)
    else:
        codes = scratch.take("result", (rows, columns), FP8)
        room = scratch.take("room", room_shape, torch.float32)
    for row in range(shape[0]):
        part = slice(row * height, min((row + 1) * height, rows))
        values, work = room[:, : part.stop - part.start]
        values.copy_(weight[part])
        amax = _amax_of_runs(torch.abs(values, out=work).amax(0), width)
        scale[row] = torch.where(amax > 0, (amax / FP8_MAX).clamp_min(_SMALLEST_SCALE), 1.0)
        wide = scale[row].repeat_interleave(width)[:columns]
        codes[part] = torch.div(values, wide, out=work).clamp_(-FP8_MAX, FP8_MAX)
    return codes, scale


def _amax_of_runs(column: Tensor, width: int) -> Tensor:
    """Largest in each run of `width` of the magnitudes [K], [ceil(K / width)]; NaN where a run holds one."""
    missing = -len(column) % width
    return torch.cat((column, column.new_zeros(missing))).view(-1, width).amax(1)


def dequantize_blocks(
    weight: Tensor, scale: Tensor, block_size: Block, dtype: torch.dtype, scratch: Scratch | None = None
) -> Tensor:
    """FP8 `weight` [N, K] times its block's scale [ceil(N / bn), ceil(K / bk)], as `dtype`.

    scratch: holds the result, on a CPU, until the next call with it.

    The same bits as `kernels.ref.gemm.dequantize`, which does the work on other devices than a CPU, for
    scales that are not finite (or above 2^119), and for rows of blocks that hold a NaN.
    """
    usual = scale.to(torch.float32).abs()
    if weight.device.type != "cpu" or not bool((usual <= _LARGEST_SCALE).all()):
        return dequantize(weight, scale, block_size, dtype)
    rows, columns = weight.shape
    work = accumulation_dtype(dtype)
    wide = (scale.to(work) * _FP16_SHIFT).repeat_interleave(block_size[1], 1)[:, :columns]
    scratch = scratch or Scratch()
    result = scratch.take("result", (rows, columns), dtype)
    codes = weight.view(torch.int8)
    items = _STEP_ITEMS if torch.get_num_threads() == 1 else _SERIAL_ITEMS
    step = min(max(1, items // max(1, columns)), max(1, rows))
    shape = (step, columns)
    room = scratch.take("codes", shape, torch.int16), scratch.take("room", shape, work)
    for row in range(scale.shape[0]):
        first, last = row * block_size[0], min((row + 1) * block_size[0], rows)
        for start in range(first, last, step):
            part = slice(start, min(start + step, last))
            halves, values = (memory[: part.stop - start] for memory in room)
            if _has_nan(halves.copy_(codes[part])):
                exact = dequantize(weight[part], scale[row : row + 1], (last - first, block_size[1]), dtype)
                result[part] = exact
                continue
            halves.bitwise_left_shift_(7).bitwise_and_(~_EXPONENT_TOP)
            result[part] = values.copy_(halves.view(torch.float16)).mul_(wide[row])
    return result


def _has_nan(codes: Tensor) -> bool:
    """Whether codes, widened with their signs, hold one of e4m3's two NaNs, 0x7F and 0xFF."""
    return codes.numel() > 0 and int(codes.bitwise_and(0x7F).max()) == 0x7F
