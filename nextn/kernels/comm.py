"""Tensor parallelism behind a few methods; one rank passes everything through.

Every collective must be reached by all ranks in the same order. The process group is torch.distributed's
default one, which whoever starts the ranks has initialised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nextn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among `size` ranks that hold the same model in equal parts."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place where there are several; every rank gets the sum."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_summands(self, summands: Tensor) -> Tensor:
        """Summands [S, N, rows] whose sum is that over all ranks: as they are where there is one rank."""
        return summands if self.size == 1 else self.all_reduce(summands.sum(0, keepdim=True))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' `x` (equal shapes) along `dim` in the order of ranks."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def shard(self, n: int, what: str) -> slice:
        """This rank's part of `n` things called `what`; `ConfigError` when they cannot be shared equally."""
        if n % self.size:
            raise ConfigError(f"{n} {what} cannot be shared equally by {self.size} ranks")
        part = n // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


SINGLE = TensorParallel(rank=0, size=1)
