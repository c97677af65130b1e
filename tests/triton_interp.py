"""Repairs Triton's CPU interpreter (TRITON_INTERPRET=1), which is silently wrong for bf16 and fp8.

In 3.6 to 3.9 as released: bf16 dot, arithmetic, reductions and sorts work on the raw 16 bits; fp32 to bf16
truncates; casts to fp8 round wrongly and do not saturate; e4m3 NaN codes load as 480; a comparison keeps its
operand's type; addresses out of bounds are read. `install()` replaces those parts, adds bounds checks, and
makes launches faster. TRITON_INTERP_OVERFLOW=1 also checks integer overflow (address arithmetic in int32).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

TORCH_DTYPE = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
FP8_MAX = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
RAW_BITS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""Types that numpy lacks, so that the interpreter holds their bits as unsigned integers."""


def install() -> None:
    """Repair the interpreter for the rest of this process; a second call does nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before the first import of triton")
    if hasattr(interpreter, "_nextn_repaired"):
        return
    interpreter._nextn_repaired = True
    _repair_arithmetic()
    _repair_casts()
    _repair_reductions()
    _repair_index()
    _speed_up_launches()
    _speed_up_reductions()
    _check_bounds()
    checked = os.environ.get("TRITON_INTERP_OVERFLOW") == "1"
    # As released the overflow checks are built for every integer operation and never evaluated.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=checked, debug=True
    )


# Conversions: torch rounds correctly, numpy has no such types.


def convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Convert raw storage between float types, to nearest even; fp8 saturates, as cvt.rn.satfinite does."""
    tensor = _to_torch(data, source)
    if target in FP8_MAX:
        tensor = tensor.float().clamp(-FP8_MAX[target], FP8_MAX[target])  # keeps NaN
    elif source in FP8_MAX:
        tensor = tensor.float()
    return _from_torch(tensor.to(TORCH_DTYPE[target]), target).reshape(np.shape(data))


def _to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    data = np.ascontiguousarray(data)
    if dtype.primitive_bitwidth == 16 and data.dtype == np.uint16:
        data = data.view(np.int16)  # torch has few operations for uint16
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(TORCH_DTYPE[dtype])


def _from_torch(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    tensor = tensor.contiguous()
    if dtype.primitive_bitwidth == 8:
        return tensor.view(torch.uint8).numpy()
    if dtype == tl.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _is_bf16(value: Any) -> bool:
    return isinstance(value, Handle) and value.dtype.scalar == tl.bfloat16


def _widen(value: Any) -> Any:
    """A bf16 handle as fp32; anything else as it is."""
    return Handle(convert(value.data, tl.bfloat16, tl.float32), tl.float32) if _is_bf16(value) else value


def _narrow(handle: Any) -> Any:
    """An fp32 handle as bf16."""
    data = np.asarray(handle.data, dtype=np.float32)
    return Handle(convert(data, tl.float32, tl.bfloat16), tl.bfloat16)


def _repair_arithmetic() -> None:
    # The builder's create_* methods all end in these; the rest of arithmetic is derived from them.
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf"):
        setattr(Builder, name, _in_fp32(getattr(Builder, name)))
    Builder.create_dot = _create_dot


def _in_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Compute on bf16 operands in fp32 and round the result; type the result of a comparison as int1."""

    @functools.wraps(operation)
    def repaired(self: Any, *args: Any) -> Any:
        any_bf16 = any(map(_is_bf16, args))
        result = operation(self, *map(_widen, args))
        if not isinstance(result, Handle):
            return result
        if result.data.dtype == np.bool_:
            return Handle(result.data, tl.int1)
        return _narrow(result) if any_bf16 and result.dtype.scalar == tl.float32 else result

    return repaired


def _create_dot(self: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
    """Exact products, accumulated in the accumulator's type (fp32 for bf16)."""
    x, y = (
        convert(h.data, h.dtype.scalar, tl.float32) if h.dtype.scalar in RAW_BITS else h.data for h in (a, b)
    )
    wide = _widen(acc)
    if x.dtype.kind == "f":
        compute = np.float64 if x.dtype == np.float64 else np.float32
        product = np.matmul(x.astype(compute, copy=False), y.astype(compute, copy=False))
    else:
        product = np.matmul(x, y, dtype=wide.data.dtype)
    total = Handle((product + wide.data).astype(wide.data.dtype, copy=False), wide.dtype.scalar)
    return _narrow(total) if _is_bf16(acc) else total


def _repair_casts() -> None:
    released_convert, released_cast = interpreter._convert_float, Builder.cast_impl

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        source, target = source.scalar, target.scalar
        if source in TORCH_DTYPE and target in TORCH_DTYPE:
            return convert(data, source, target)
        return released_convert(data, source, target, rounding)

    def cast_impl(self: Any, handle: Any, target_type: Any) -> Any:
        source, target = handle.dtype.scalar, target_type.scalar
        if source == target:
            return Handle(handle.data, target)
        if source not in RAW_BITS and target not in RAW_BITS:
            return released_cast(self, handle, target_type)
        if source in TORCH_DTYPE and target in TORCH_DTYPE:
            return Handle(convert(handle.data, source, target), target)
        if source in RAW_BITS:  # to an integer, by way of fp32
            wide = Handle(convert(handle.data, source, tl.float32), tl.float32)
            return released_cast(self, wide, target_type)
        return Handle(convert(np.asarray(handle.data).astype(np.float32), tl.float32, target), target)

    def create_fp_to_fp(self: Any, handle: Any, target_type: Any, rounding: Any = None) -> Any:
        source, target = handle.dtype.scalar, target_type.scalar
        data = convert_float(handle.data, source, target, rounding)
        return Handle(data.view(interpreter._get_np_dtype(target_type)), target)

    interpreter._convert_float = convert_float
    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.get_bf16 = lambda self, value: _narrow(Handle(np.array([value], dtype=np.float32), tl.float32))


def _repair_reductions() -> None:
    for owner, names in (
        (interpreter.ReduceOps, ("min_max", "sum", "generic_reduce")),
        (interpreter.ScanOps, ("cumsum", "cumprod", "generic_scan")),
    ):
        for name in names:
            setattr(owner, name, _reducing_in_fp32(getattr(owner, name)))


def _reducing_in_fp32(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Widen bf16 tensors around a reduction or scan, which works on numpy data directly."""

    @functools.wraps(reduce)
    def repaired(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        many = isinstance(values, (list, tuple))
        inputs = list(values) if many else [values]
        if not any(tensor.dtype == tl.bfloat16 for tensor in inputs):
            return reduce(self, values, *args, **kwargs)
        wide = [_retyped(t, tl.float32) if t.dtype == tl.bfloat16 else t for t in inputs]
        result = reduce(self, type(values)(wide) if many else wide[0], *args, **kwargs)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        for i, tensor in enumerate(outputs):
            if tensor.dtype == tl.float32 and inputs[min(i, len(inputs) - 1)].dtype == tl.bfloat16:
                outputs[i] = _retyped(tensor, tl.bfloat16)
        return type(result)(outputs) if isinstance(result, (list, tuple)) else outputs[0]

    return repaired


def _retyped(tensor: Any, dtype: Any) -> Any:
    data = convert(tensor.handle.data, tensor.dtype, dtype)
    block = tl.block_type(dtype, list(tensor.shape)) if tensor.type.is_block() else dtype
    return tl.core.tensor(Handle(data, dtype), block)


def _repair_index() -> None:
    """Let a tensor be an index or a bound of `range` with numpy >= 2.4, which 3.6.0 does not."""
    released = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        released(tensor, *scope)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch_lang_tensor


class _Launch:
    """Which modules of triton.language are patched while a kernel runs, and how to restore them."""

    def __init__(self, owner: _LanguagePatches) -> None:
        self.owner = owner
        self.patched: set[str] = set()
        self.scopes: list[Any] = []

    def restore(self) -> None:
        for scope in reversed(self.scopes):
            scope.restore()
        self.owner.current = None


class _Nested:
    """What a nested call gets instead of a launch: the launch restores for it."""

    def restore(self) -> None:
        return


class _LanguagePatches:
    """Patches triton.language once a launch, not at every nested call (0.5 ms each, and never undone)."""

    def __init__(self) -> None:
        self.released = interpreter._patch_lang
        self.current: _Launch | None = None
        self.modules = functools.cache(self._modules)

    @staticmethod
    def _modules(fn: Any) -> frozenset[str]:
        known = (("tl", tl), ("core", tl.core))
        return frozenset(name for name, module in known if any(v is module for v in fn.__globals__.values()))

    def __call__(self, fn: Any) -> _Launch | _Nested:
        modules = self.modules(fn)
        launch = self.current
        if launch is not None and modules and modules <= launch.patched:
            return _Nested()
        scope = self.released(fn)  # raises where triton.language is not visible, before any state changes
        if launch is None:
            self.current = launch = _Launch(self)
            result: _Launch | _Nested = launch
        else:
            result = _Nested()
        launch.patched |= modules
        launch.scopes.append(scope)
        return result


def _speed_up_launches() -> None:
    interpreter._patch_lang = _LanguagePatches()


def _speed_up_reductions() -> None:
    """Let numpy do the reductions (of sort and top-k) that the release walks element by element."""
    released = interpreter.ReduceOps.apply_impl
    bitwise = {tl.standard._xor_combine: np.bitwise_xor, tl.standard._or_combine: np.bitwise_or}
    first = {
        tl.standard._argmax_combine_tie_break_fast: (np.max, np.argmax),
        tl.standard._argmin_combine_tie_break_fast: (np.min, np.argmin),
    }

    def apply_impl(self: Any, values: Any) -> Any:
        if self.combine_fn in first:
            pick, index = first[self.combine_fn]
            return self.min_max(values[0], val_reduce_op=pick, idx_reduce_op=index)
        if self.combine_fn not in bitwise:
            return released(self, values)
        data = values[0].handle.data
        axis = tuple(range(data.ndim)) if self.axis is None else self.axis
        result = bitwise[self.combine_fn].reduce(data, axis=axis, keepdims=self.keep_dims)
        return (self.to_tensor(result, values[0].dtype),)

    interpreter.ReduceOps.apply_impl = apply_impl


class _Bounds:
    """Address ranges of the storages that the running kernel was given, sorted."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raise IndexError unless every unmasked lane lies inside one of the storages."""
        address = np.asarray(pointers.data)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if mask is not None:
            lanes = np.asarray(mask.data if isinstance(mask, Handle) else mask).astype(bool)
            shape = np.broadcast_shapes(address.shape, lanes.shape)
            address = np.broadcast_to(address, shape)[np.broadcast_to(lanes, shape)]
        if not self.ranges or address.size == 0:
            return
        lowest, highest = int(address.min()), int(address.max()) + width
        if any(start <= lowest and highest <= end for start, end in self.ranges):
            return
        inside = np.zeros(address.shape, bool)
        for start, end in self.ranges:
            inside |= (address >= np.uint64(start)) & (address + np.uint64(width) <= np.uint64(end))
        if not inside.all():
            raise IndexError(self._describe(what, address[~inside], width))

    def _describe(self, what: str, outside: np.ndarray, width: int) -> str:
        first = int(outside.reshape(-1)[0])
        start, end = min(self.ranges, key=lambda span: min(abs(first - span[0]), abs(first - span[1])))
        return (
            f"{what} out of bounds in program {interpreter.interpreter_builder.grid_idx}: {outside.size} "
            f"lanes; the first is {(first - start) // width} elements (of {width} bytes) from the start "
            f"of a storage of {(end - start) // width} elements"
        )


def _storages(values: Iterable[Any]) -> set[tuple[int, int]]:
    """First and one past the last address of every tensor among kernel arguments."""
    found: set[tuple[int, int]] = set()
    for value in values:
        if isinstance(value, (tuple, list)):
            found |= _storages(value)
        elif isinstance(value, interpreter.TensorDescriptor):
            found |= _storages([value.base])
        elif hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


def _check_bounds() -> None:
    """Refuse memory outside the arguments' storages: as released it is read, or kills the process."""
    bounds = _Bounds()
    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, bounds.ranges = bounds.ranges, sorted(_storages([*args, *kwargs.values()]))
        try:
            return launch(self, *args, **kwargs)
        finally:
            bounds.ranges = outer

    def guarded(access: Callable[..., Any], what: str, pointer: int, mask: int | None) -> Callable[..., Any]:
        @functools.wraps(access)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            bounds.check(what, args[pointer], None if mask is None else args[mask])
            return access(self, *args, **kwargs)

        return checked

    interpreter.GridExecutor.__call__ = call
    for name, what, pointer, mask in (
        ("create_masked_load", "load", 0, 1),
        ("create_masked_store", "store", 0, 2),
        ("create_atomic_rmw", "atomic", 1, 3),
        ("create_atomic_cas", "atomic_cas", 0, None),
    ):
        setattr(Builder, name, guarded(getattr(Builder, name), what, pointer, mask))
