"""The linear kernels on a CUDA device at the sizes of a tensor-parallel rank of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nextn.kernels import gemm
from nextn.kernels.ref import gemm as ref
from tests.compare import assert_close

pytestmark = pytest.mark.gpu
BLOCK = (128, 128)
FP8_SHAPES = [(2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 2304)]
BF16_SHAPES = [(7168, 14336), (16160, 7168)]


def _weight(rows: int, columns: int, fp8: bool) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(rows, columns, device="cuda")
    if not fp8:
        return weight.bfloat16(), None
    return weight.to(ref.FP8), torch.rand(ref.scale_shape(rows, columns, BLOCK), device="cuda") + 0.5


def _x(tokens: int, columns: int) -> Tensor:
    return torch.randn(tokens, columns + 64, device="cuda").bfloat16()[:, :columns]


@pytest.mark.parametrize(
    ("rows", "columns", "fp8"), [(*s, True) for s in FP8_SHAPES] + [(*s, False) for s in BF16_SHAPES]
)
def test_equals_its_twin_and_a_token_has_the_same_bits_in_any_batch(rows, columns, fp8):
    x, (weight, scale) = _x(64, columns), _weight(rows, columns, fp8)
    every = gemm.linear_summands(x, weight, scale, BLOCK)
    assert_close(every.sum(0), ref.linear(x.float(), weight.float(), scale, BLOCK), "fp8-linear")
    for tokens in (1, 2, 4, 8, 16, 17, 32, 33, 63):
        assert_close(
            gemm.linear_summands(x[:tokens], weight, scale, BLOCK), every[:, :tokens].contiguous(), "bitwise"
        )
    for dtype in (torch.float32, torch.bfloat16):
        actual = gemm.linear(x, weight, scale, BLOCK, out_dtype=dtype)
        total = every[0].clone()
        for part in every[1:]:
            total += part
        assert_close(actual, total.to(dtype), "bitwise")


@pytest.mark.parametrize(
    ("rows", "columns", "fp8"), [(2112, 7168, True), (7168, 2048, True), (7168, 4096, False)]
)
@pytest.mark.parametrize("tokens", [65, 129, 1000, 4096])
def test_many_tokens_equal_the_twin(tokens, rows, columns, fp8):
    x, (weight, scale) = _x(tokens, columns), _weight(rows, columns, fp8)
    actual = gemm.linear(x, weight, scale, BLOCK, out_dtype=torch.float32)
    assert_close(actual, ref.linear(x.float(), weight.float(), scale, BLOCK), "fp8-linear")


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_orientation_and_prefetch_change_no_result(weights_first, prefetch):
    """On a weight whose rows and columns no tile divides."""
    x, (weight, scale) = _x(5, 1000), _weight(300, 1000, True)
    config = gemm.choose_config(5, 300, 1000, fp8=True)
    config = replace(config, splits=2, weights_first=weights_first, prefetch=prefetch)
    actual = gemm.linear(x, weight, scale, BLOCK, out_dtype=torch.float32, config=config)
    assert_close(actual, ref.linear(x.float(), weight.float(), scale, BLOCK), "fp8-linear")


def test_every_fp8_number_is_converted_exactly():
    """All finite codes, subnormal ones too, times one."""
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat_interleave(128).view(254, 128).clone()
    codes[:, 1:] = 0
    x = torch.ones(1, 128, device="cuda").bfloat16()
    weight = codes.view(ref.FP8)
    actual = gemm.linear(x, weight, torch.ones(2, 1, device="cuda"), BLOCK, out_dtype=torch.float32)
    assert torch.equal(actual[0], weight[:, 0].float())


def test_replays_in_a_graph_on_new_inputs():
    """A chain of dependent launches, so that each waits for the one before it."""
    (first, scale), (second, _) = _weight(2048, 2048, True), _weight(2048, 2048, False)
    second /= 45.0
    x = _x(4, 2048).contiguous()

    def chain() -> Tensor:
        out = x
        for _ in range(8):
            out = gemm.linear(gemm.linear(out, first, scale, BLOCK), second)
            out = (out * 0.02).bfloat16()
        return out

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        x.copy_(_x(4, 2048))
        graph.replay()
        assert_close(captured, chain(), "bitwise")
