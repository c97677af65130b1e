"""The interpreter under the kernel tests computes what a GPU would: bf16, fp8, bounds, control flow."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.compare import assert_close
from tests.conftest import HAS_CUDA

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="with CUDA kernels are compiled, not interpreted")


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot_multiplies_values_and_not_bits(dtype):
    a, b, c = torch.randn(16, 64).to(dtype), torch.randn(64, 32).to(dtype), torch.zeros(16, 32)
    dot_kernel[(1,)](a, b, c, 16, 32, 64)
    assert_close(c, (a.double() @ b.double()).float(), "fp32-op")


@triton.jit
def cast_kernel(x, y, n, B: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0).to(DTYPE), mask=i < n)


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        (torch.float32, torch.bfloat16, tl.bfloat16),
        (torch.float32, torch.float8_e4m3fn, tl.float8e4nv),
        (torch.bfloat16, torch.float8_e4m3fn, tl.float8e4nv),
        (torch.float32, torch.float8_e5m2, tl.float8e5),
        (torch.bfloat16, torch.float32, tl.float32),
    ],
)
def test_cast_rounds_to_nearest_even(source, target, name):
    ties = torch.tensor([0.0, -0.0, 1 + 2**-9, 1 + 3 * 2**-9, 17.0, 19.0, 2**-9, 2**-10, 3 * 2**-10, 448.0])
    x = torch.cat([ties, torch.randn(990) * 20]).to(source)
    y = torch.zeros(1000, dtype=target)
    cast_kernel[(4,)](x, y, 1000, 256, name)
    assert_close(y, x.to(target), "bitwise")


def test_cast_to_e4m3_saturates_and_keeps_nan():
    x = torch.tensor([449.0, 1e9, -500.0, float("inf"), float("nan")])
    y = torch.zeros(5, dtype=torch.float8_e4m3fn)
    cast_kernel[(1,)](x, y, 5, 8, tl.float8e4nv)
    assert_close(y.float(), torch.tensor([448.0, 448.0, -448.0, 448.0, float("nan")]), "fp32-op")


def test_every_e4m3_code_loads_as_its_value():
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    y = torch.zeros(256)
    cast_kernel[(1,)](x, y, 256, 256, tl.float32)
    assert_close(y, x.float(), "fp32-op")
    assert int(y.isnan().sum()) == 2


@triton.jit
def bf16_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(y + i, v * v + v)
    tl.store(y + N + i, tl.sort(v))
    tl.store(y + 2 * N, tl.sum(v))
    tl.store(y + 2 * N + 1, tl.max(tl.cumsum(v)))
    tl.store(y + 2 * N + 2, tl.sum(tl.where(v > 0, v, 0.0)))
    tl.store(y + 2 * N + 3, tl.sum(v.to(tl.int32)).to(tl.bfloat16))


def test_bf16_arithmetic_sorts_and_reductions():
    x = (torch.randint(-8, 9, (32,)) / 2).bfloat16()  # sums of these are exact in bf16
    y = torch.zeros(2 * 32 + 4).bfloat16()
    bf16_kernel[(1,)](x, y, 32)
    f = x.float()
    sums = torch.stack([f.sum(), f.cumsum(0).max(), f.clamp(min=0).sum(), f.int().sum().float()])
    assert_close(y, torch.cat([x * x + x, x.sort().values, sums.bfloat16()]), "bitwise")


@triton.jit
def ragged_sum_kernel(x, lens, y, stride, B: tl.constexpr):
    row = tl.program_id(0)
    n = tl.load(lens + row)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        total += tl.load(x + row * stride + i, mask=(n > 0) & (i < n), other=0.0)
    tl.store(y + row, tl.sum(total))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loop_bounds_and_masks_may_be_loaded_scalars(dtype):
    x, lens, y = torch.randn(4, 100), torch.tensor([0, 1, 77, 100], dtype=dtype), torch.zeros(4)
    ragged_sum_kernel[(4,)](x, lens, y, x.stride(0), 16)
    assert_close(y, torch.stack([x[i, :n].sum() for i, n in enumerate(lens.tolist())]), "fp32-op")


@triton.jit
def copy_kernel(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize(("sizes", "what"), [((15, 16), "load"), ((16, 15), "store")])
def test_access_out_of_bounds_is_an_error(sizes, what):
    x, y = torch.zeros(sizes[0]), torch.zeros(sizes[1])
    with pytest.raises(Exception, match=f"{what} out of bounds.* 1 lanes.*element"):
        copy_kernel[(1,)](x, y, 16, 16)


def test_masked_lanes_may_lie_out_of_bounds():
    x, y = torch.randn(5), torch.zeros(5)
    copy_kernel[(1,)](x, y, 5, 16)
    assert_close(y, x, "bitwise")


@triton.jit
def topk_kernel(x, y, z, N: tl.constexpr, K: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(y + tl.arange(0, K), tl.topk(v, K))
    tl.store(z, tl.argmax(v, 0))
    tl.store(z + 1, tl.xor_sum(v.to(tl.int32, bitcast=True)))


def test_topk_argmax_and_xor():
    """argmax gives the first of equal values."""
    x = torch.randn(64)
    x[5] = x[40] = 9.0
    y, z = torch.zeros(8), torch.zeros(2, dtype=torch.int32)
    topk_kernel[(1,)](x, y, z, 64, 8)
    xor = 0
    for bits in x.view(torch.int32).tolist():
        xor ^= bits
    assert_close(y, x.topk(8).values, "bitwise")
    assert z.tolist() == [5, xor]


@triton.jit
def last_program_sums_kernel(x, parts, count, y, B: tl.constexpr):
    p, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + p, tl.sum(tl.load(x + p * B + tl.arange(0, B))))
    if tl.atomic_add(count, 1, sem="acq_rel") == programs - 1:
        total = 0.0
        for i in range(programs):
            total += tl.load(parts + i)
        tl.store(y, total)


def test_atomics_find_the_last_program():
    x, y = torch.randn(4, 32), torch.zeros(1)
    last_program_sums_kernel[(4,)](
        x, torch.full((4,), float("nan")), torch.zeros(1, dtype=torch.int32), y, 32
    )
    assert_close(y, x.sum().reshape(1), "fp32-op")
