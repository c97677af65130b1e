"""Whether something drifts over a run: step times at equal work, and memory.

A run is cut into blocks of equal time, and each block gets one figure, so that steps that follow each other,
which are alike for many reasons, do not count as independent.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

BLOCKS = 40
KEPT = 128
"""Steps of one kind kept a block, drawn from all of them; what is kept must not itself look like a leak."""
MIN_STEPS = 5
"""Steps of one kind without which a block says nothing of them."""
ROUNDS = 10_000
MAX_CHANGE, MIN_P = 0.03, 0.01
MIN_QUARTER = 5
"""Blocks in a quarter of a run without which no difference, however large, could reach `MIN_P`."""


def theil_sen(values: Sequence[float]) -> float:
    """Median slope between all pairs, a step of the sequence; 0 for fewer than two values."""
    slopes = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2)]
    return statistics.median(slopes) if slopes else 0.0


def permutation_p(first: Sequence[float], last: Sequence[float], seed: int = 0) -> float:
    """How often a random split of both together has means as far apart, to either side."""
    rng, pool = random.Random(seed), [*first, *last]
    found = abs(statistics.fmean(last) - statistics.fmean(first))
    as_far = 0
    for _ in range(ROUNDS):
        rng.shuffle(pool)
        apart = abs(statistics.fmean(pool[len(first) :]) - statistics.fmean(pool[: len(first)]))
        as_far += apart >= found - 1e-12
    return (as_far + 1) / (ROUNDS + 1)


@dataclass(frozen=True, slots=True)
class Change:
    """Last quarter of the blocks against the first: relative change, its p, and the slope over the run."""

    change: float
    p: float
    slope: float
    blocks: int

    @property
    def is_noise(self) -> bool:
        """Small, or likely by chance."""
        return abs(self.change) < MAX_CHANGE or self.p >= MIN_P

    def __str__(self) -> str:
        return (
            f"{self.change:+.2%} from the first to the last quarter of {self.blocks} blocks, permutation "
            f"p = {self.p:.3f}, Theil-Sen slope {self.slope:+.2%} over the run; noise is p >= {MIN_P} or "
            f"less than {MAX_CHANGE:.0%}"
        )


class StepTimes:
    """Decode steps by block and kind. A kind is what a step's cost depends on: shape, occupancy, context.

    A block's figure is the mean of its steps' times, each block's median of a kind by that kind's median over
    all blocks, weighted by steps: 1.02 is 2 % slower than usual.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._kept: dict[tuple[int, Hashable], array[float]] = defaultdict(lambda: array("d"))
        self._seen: dict[tuple[int, Hashable], int] = defaultdict(int)

    def add(self, block: int, kind: Hashable, ms: float) -> None:
        """Note a step; of many alike in a block a random part is kept."""
        key = block, kind
        kept = self._kept[key]
        self._seen[key] += 1
        if len(kept) < KEPT:
            kept.append(ms)
        elif (place := self._rng.randrange(self._seen[key])) < KEPT:
            kept[place] = ms

    def blocks(self) -> list[float]:
        """The figure of each block that has one, in order."""
        medians = {key: statistics.median(kept) for key, kept in self._kept.items() if len(kept) >= MIN_STEPS}
        by_kind: dict[Hashable, list[float]] = defaultdict(list)
        for (_, kind), median in medians.items():
            by_kind[kind].append(median)
        shares: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for (block, kind), median in medians.items():
            if len(by_kind[kind]) > 1:  # alone it would be compared with itself
                shares[block].append((median / statistics.median(by_kind[kind]), self._seen[block, kind]))
        return [
            sum(value * weight for value, weight in shares[block])
            / sum(weight for _, weight in shares[block])
            for block in sorted(shares)
        ]

    def change(self) -> Change | None:
        """The test; None where there are too few blocks to say anything. The first block is a warm-up."""
        values = self.blocks()[1:]
        quarter = len(values) // 4
        if quarter < MIN_QUARTER:
            return None
        first, last = values[:quarter], values[-quarter:]
        change = statistics.fmean(last) / statistics.fmean(first) - 1
        return Change(change, permutation_p(first, last), theil_sen(values) * (len(values) - 1), len(values))


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes in the second and in the last quarter of a run: medians of what each block held at least."""

    before: float
    after: float
    limit: float

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than the limit."""
        return self.after - self.before <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.before / 2**20:.0f} MiB in the second quarter, {self.after / 2**20:.0f} in the last; "
            f"may grow by {self.limit / 2**20:.0f}"
        )


class Memory:
    """The least of a size in each block: what is held for a moment does not count, what stays does."""

    def __init__(self, least_limit: int, share: float = 0.02) -> None:
        """It may grow by `share`, or by `least_limit` bytes where that is more."""
        self._blocks: dict[int, int] = {}
        self._least_limit, self._share = least_limit, share

    def add(self, block: int, size: int) -> None:
        """Note a size in bytes."""
        self._blocks[block] = min(size, self._blocks.get(block, size))

    def growth(self) -> Growth | None:
        """The test; None for fewer than eight blocks. The first quarter is a warm-up."""
        values = [self._blocks[block] for block in sorted(self._blocks)]
        quarter = len(values) // 4
        if quarter < 2:
            return None
        before = statistics.median(values[quarter : 2 * quarter])
        after = statistics.median(values[-quarter:])
        return Growth(before, after, max(self._least_limit, self._share * before))
