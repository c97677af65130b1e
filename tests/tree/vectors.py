"""Trees worked out by hand, with ties, zeros and underflow: the draft's children, and what must come out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nextn.config import SpecConfig

Path = tuple[int, ...]
ROOT = 99


def _halves(*exponents: int) -> tuple[float, ...]:
    return tuple(2.0**-exponent for exponent in exponents)


def _children(*tokens: int, p: tuple[float, ...]) -> list[tuple[int, float]]:
    return list(zip(tokens, p, strict=True))


@dataclass(frozen=True)
class Vector:
    """`children` maps a path below the root to (token, probability); `other` serves any path not in it."""

    shape: str
    children: Mapping[Path, list[tuple[int, float]]]
    chosen: list[int]
    parents: list[int]
    beams: list[list[int]] | None = None
    tokens: list[int] | None = None
    depths: list[int] | None = None
    masks: list[int] | None = None
    leaf_paths: list[list[int]] | None = None
    other: list[tuple[int, float]] = field(default_factory=list)

    @property
    def spec(self) -> SpecConfig:
        return SpecConfig.parse(self.shape)

    def log_children(self, path: Path) -> list[tuple[int, float]]:
        """(token, log-probability) after `path`; -inf for a probability of 0."""
        pairs = self.children.get(path, self.other)
        return [(token, math.log(p) if p else -math.inf) for token, p in pairs]


BEAM_OF_BRANCHES = {
    (): _children(11, 12, 13, p=(0.60, 0.25, 0.10)),
    (11,): _children(21, 22, 23, p=(0.50, 0.30, 0.10)),
    (12,): _children(24, 25, 26, p=(0.90, 0.05, 0.02)),
    (13,): _children(27, 28, 29, p=(0.40, 0.20, 0.10)),
    (11, 21): _children(31, 32, 33, p=(0.70, 0.20, 0.05)),
    (12, 24): _children(34, 35, 36, p=(0.60, 0.30, 0.05)),
    (11, 22): _children(37, 38, 39, p=(0.80, 0.10, 0.05)),
}

TIES = {
    (): _children(40, 41, 42, 43, p=_halves(1, 2, 3, 3)),
    (40,): _children(50, 51, 52, 53, p=_halves(2, 3, 4, 5)),
    (41,): _children(60, 61, 62, 63, p=_halves(1, 2, 3, 4)),
    (42,): _children(70, 71, 72, 73, p=(1.0, 0.0, 0.0, 0.0)),
    (43,): _children(80, 81, 82, 83, p=_halves(1, 2, 3, 4)),
}

DEEP = {
    (): _children(10, 11, 12, 13, p=_halves(1, 2, 4, 5)),
    (10,): _children(20, 21, 22, 23, p=_halves(2, 3, 4, 5)),
    (11,): _children(20, 24, 25, 26, p=_halves(1, 2, 4, 5)),
    (12,): _children(27, 28, 29, 30, p=(1.0, 0.0, 0.0, 0.0)),
    (13,): _children(31, 32, 33, 34, p=_halves(1, 2, 3, 4)),
    (10, 20): _children(40, 41, 42, 43, p=(7 / 8, *_halves(4, 5, 6))),
    (11, 20): _children(44, 45, 46, 47, p=(7 / 8, *_halves(4, 5, 6))),
    (10, 21): _children(48, 49, 50, 51, p=_halves(1, 2, 3, 4)),
    (11, 24): _children(52, 53, 54, 55, p=_halves(1, 2, 3, 4)),
    (10, 20, 40): _children(60, 61, 62, 63, p=(7 / 8, *_halves(4, 5, 6))),
    (11, 20, 44): _children(64, 65, 66, 67, p=(3 / 4, *_halves(3, 4, 5))),
    (10, 21, 48): _children(68, 69, 70, 71, p=_halves(1, 2, 3, 4)),
    (11, 24, 52): _children(72, 73, 74, 75, p=_halves(1, 2, 3, 4)),
}
DEEP_BEAMS = [[0, 1, 2, 3], [4, 8, 5, 9], [20, 24, 28, 32]]

UNDERFLOW = {
    (): _children(11, 12, 13, 14, p=(1.0, 1e-30, 0.0, 0.0)),
    (11,): _children(21, 22, 23, 24, p=(1.0, 1e-30, 0.0, 0.0)),
    (12,): _children(25, 26, 27, 28, p=(1e-20, 0.0, 0.0, 0.0)),
    (11, 21): _children(31, 32, 33, 34, p=(1.0, 0.0, 0.0, 0.0)),
    (11, 22): _children(35, 36, 37, 38, p=(1e-20, 0.0, 0.0, 0.0)),
    (11, 21, 31): _children(41, 42, 43, 44, p=(1.0, 0.0, 0.0, 0.0)),
}

VECTORS = {
    "a": Vector(
        "3/3/8",
        BEAM_OF_BRANCHES,
        beams=[[0, 1, 2], [3, 6, 4]],
        chosen=[0, 1, 3, 4, 6, 12, 18],
        tokens=[ROOT, 11, 12, 21, 22, 24, 31, 37],
        parents=[-1, 0, 0, 1, 1, 2, 3, 4],
        depths=[0, 1, 1, 2, 2, 2, 3, 3],
        masks=[1, 3, 5, 11, 19, 37, 75, 147],
        leaf_paths=[[0, 2, 5], [0, 1, 3, 6], [0, 1, 4, 7]],
    ),
    "c: a tie of five": Vector(
        "2/4/4",
        TIES,
        chosen=[0, 1, 2],
        tokens=[ROOT, 40, 41, 42],
        parents=[-1, 0, 0, 0],
        depths=[0, 1, 1, 1],
        leaf_paths=[[0, 1], [0, 2], [0, 3]],
    ),
    "c: more nodes": Vector("2/4/7", TIES, chosen=[0, 1, 2, 3, 4, 8], parents=[-1, 0, 0, 0, 0, 1, 2]),
    "d": Vector(
        "4/4/8",
        DEEP,
        beams=DEEP_BEAMS,
        chosen=[0, 1, 4, 8, 20, 24, 36],
        tokens=[ROOT, 10, 11, 20, 20, 40, 44, 60],
        parents=[-1, 0, 0, 1, 2, 3, 4, 5],
        depths=[0, 1, 1, 2, 2, 3, 3, 4],
        masks=[1, 3, 5, 11, 21, 43, 85, 171],
        leaf_paths=[[0, 2, 4, 6], [0, 1, 3, 5, 7]],
    ),
    "d: more nodes": Vector(
        "4/4/10",
        DEEP,
        beams=DEEP_BEAMS,
        chosen=[0, 1, 2, 4, 8, 20, 24, 36, 40],
        parents=[-1, 0, 0, 0, 1, 2, 4, 5, 6, 7],
    ),
    "e: a chain": Vector(
        "3/1/4",
        {(): [(11, 0.5)], (11,): [(12, 0.25)], (11, 12): [(11, 0.125)]},
        beams=[[0], [1]],
        chosen=[0, 1, 2],
        tokens=[ROOT, 11, 12, 11],
        parents=[-1, 0, 1, 2],
        depths=[0, 1, 2, 3],
        leaf_paths=[[0, 1, 2, 3]],
    ),
    "f: underflow": Vector(
        "4/4/8",
        UNDERFLOW,
        other=_children(50, 51, 52, 53, p=(0.25,) * 4),
        beams=[[0, 1, 2, 3], [4, 5, 8, 6], [20, 24, 28, 29]],
        chosen=[0, 1, 4, 5, 8, 20, 36],
        tokens=[ROOT, 11, 12, 21, 22, 25, 31, 41],
        parents=[-1, 0, 0, 1, 1, 2, 3, 6],
    ),
}
