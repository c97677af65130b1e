"""The one table of tolerances, each with its reason, and the comparison that names the first bad coordinate.

An element may differ by `bound * max(|expected|, rms(expected))`: relative to itself, or to the tensor's
typical magnitude where cancellation leaves a small number. A row is never loosened to make a test pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["bitwise", "fp64", "fp32-logits", "fp32-op", "bf16-op", "bf16-attention", "fp8-linear"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A bound relative to an element or to the root mean square of its tensor, and why it is that number."""

    bound: float
    reason: str


TOLERANCES: dict[Kind, Tolerance] = {
    "bitwise": Tolerance(0.0, "copies, integers, routing, masks and whatever promises the same bits"),
    "fp64": Tolerance(1e-10, "2^-52 a rounding through some 1e4 roundings; a wrong formula shows at once"),
    "fp32-logits": Tolerance(1e-4, "2^-23 a rounding through every layer of a small model, in any order"),
    "fp32-op": Tolerance(1e-5, "2^-23 a rounding through one op of up to some 1000 terms, in any order"),
    "bf16-op": Tolerance(2.0**-6, "2^-8 for the result's rounding on both sides, as much for an operand's"),
    "bf16-attention": Tolerance(
        2.0**-4, "weights, partial results and values are rounded to bf16; 8 sigma of 1e6"
    ),
    "fp8-linear": Tolerance(2.0**-6, "both sides have the same FP8 weights; what differs is bf16 rounding"),
}


def assert_close(actual: Tensor, expected: Tensor, kind: Kind, *, what: str = "value") -> None:
    """Fail unless both agree in shape, dtype and, within the row `kind`, in every element.

    NaN equals NaN and an infinity equals itself only, whatever the kind. `what` names the tensor.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} != {expected.dtype}"
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    if kind == "bitwise":
        bad = _differing_bits(actual, expected)
        allowed = torch.zeros(expected.shape, dtype=torch.float64)
    else:
        allowed = _allowed(expected.double(), TOLERANCES[kind].bound)
        bad = ~_within(actual.double(), expected.double(), allowed)
    if bad.any():
        raise AssertionError(_report(actual, expected, allowed, bad, kind, what))


def _differing_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where the stored bytes differ: tells -0 from 0 and one NaN from another.  # bool, the tensors' shape"""
    size = (*actual.shape, actual.element_size())
    raw = [tensor.reshape(-1).view(torch.uint8).reshape(size) for tensor in (actual, expected)]
    return (raw[0] != raw[1]).any(-1)


def _allowed(expected: Tensor, bound: float) -> Tensor:
    """The permitted difference at every element."""
    finite = expected[expected.isfinite()]
    rms = finite.square().mean().sqrt() if finite.numel() else expected.new_zeros(())
    return bound * expected.abs().clamp(min=rms)


def _within(actual: Tensor, expected: Tensor, allowed: Tensor) -> Tensor:
    close = (actual - expected).abs() <= allowed
    finite = actual.isfinite() & expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(finite, close, same)


def _report(actual: Tensor, expected: Tensor, allowed: Tensor, bad: Tensor, kind: Kind, what: str) -> str:
    """The first bad coordinate, the worst one, and how many there are."""
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    worst = torch.where(bad, difference, -1.0).argmax()
    where = {
        "first": tuple(bad.nonzero()[0].tolist()),
        "worst": tuple(int(i) for i in torch.unravel_index(worst, bad.shape)),
    }
    lines = [f"{what}: {int(bad.sum())} of {bad.numel()} elements differ by more than {kind!r} allows"]
    for name, at in where.items():
        lines.append(
            f"  {name} at {at}: {actual[at].item()!r}, expected {expected[at].item()!r}, "
            f"allowed difference {allowed[at].item():.3g}"
        )
    return "\n".join([*lines, f"  ({kind}: {TOLERANCES[kind].reason})"])
