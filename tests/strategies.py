"""Hypothesis strategies for tree shapes, toy draft models and sampling, and builders of their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from nextn.config import MAX_TREE_NODES, SpecConfig
from nextn.kernels.ref.sampling import SamplingBatch

VALUES = (0.0, -0.0, -0.25, -0.5, -1.0, -1.0, -3.0, -200.0, -math.inf, math.nan)
"""Log-values that tie often, and every kind that a growth must survive."""


@st.composite
def specs(draw: st.DrawFn, max_steps: int = 4, max_topk: int = 4) -> SpecConfig:
    """Any valid tree shape up to `max_steps` levels and `max_topk` children."""
    steps, topk = draw(st.integers(1, max_steps)), draw(st.integers(1, max_topk))
    pool = topk + (steps - 1) * topk**2
    nodes = steps + 1 if topk == 1 else draw(st.integers(2, min(pool + 1, MAX_TREE_NODES)))
    return SpecConfig(steps, topk, nodes)


@dataclass(frozen=True)
class TableDraft:
    """A draft model as a table of log-values [B, R, V]: a path reads the row that its hash names."""

    table: Tensor

    def rows(self, paths: Tensor) -> Tensor:
        """Log-values [B, M, V] after paths [B, M, L] of tokens below the root."""
        number = paths.new_zeros(paths.shape[:-1])
        for level in range(paths.shape[-1]):
            number = (number * 31 + paths[..., level] + 1) % self.table.shape[1]
        return self.table.gather(1, number.unsqueeze(-1).expand(-1, -1, self.table.shape[2]))

    def children(self, row: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """The same for one row and one path, as the naive version wants it."""
        number = 0
        for token in path:
            number = (number * 31 + token + 1) % self.table.shape[1]
        return list(enumerate(self.table[row, number].tolist()))


@st.composite
def table_drafts(draw: st.DrawFn, topk: int) -> TableDraft:
    """Drafts of 1 to 3 rows whose vocabulary has at least `topk` tokens, with ties, zeros, -inf and NaN."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(topk, topk + 3)))
    entries = draw(st.lists(st.sampled_from(VALUES), min_size=math.prod(shape), max_size=math.prod(shape)))
    dtype = draw(st.sampled_from((torch.float32, torch.float64)))
    return TableDraft(torch.tensor(entries, dtype=dtype).view(shape))


@st.composite
def grown(draw: st.DrawFn) -> tuple[SpecConfig, TableDraft]:
    """A shape and a draft that can grow it."""
    spec = draw(specs())
    return spec, draw(table_drafts(spec.topk))


@dataclass(frozen=True)
class Knobs:
    """How one row samples; the fields are `SamplingBatch`'s."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    choice: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    ban_until: int = 0

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalties(self) -> bool:
        return bool(self.frequency or self.presence) or self.repetition != 1

    @property
    def biases(self) -> bool:
        return bool(self.bias) or bool(self.banned)


BIASES, BANNED = 4, 3
"""Entries for biased and for banned tokens a row; the engine has more."""


def sampling_batch(
    rows: Sequence[Knobs],
    vocab: int,
    counts: Tensor | None = None,
    prompt_seen: Tensor | None = None,
    grammar: Tensor | None = None,
) -> SamplingBatch:
    """A batch with the flags that its rows need; without `counts` [B, V] nothing was written yet."""
    ids = [[token for token, _ in row.bias] for row in rows]
    values = [[value for _, value in row.bias] for row in rows]
    banned = [[*row.banned, *[-1] * (BANNED - len(row.banned))] for row in rows]
    columns = {
        name: torch.tensor([getattr(row, name) for row in rows], dtype=dtype)
        for name, dtype in (
            *((name, torch.float32) for name in ("temperature", "top_p", "min_p")),
            *((name, torch.float32) for name in ("frequency", "presence", "repetition")),
            *((name, torch.int64) for name in ("top_k", "seed", "choice")),
        )
    }
    return SamplingBatch(
        **columns,
        counts=torch.zeros(len(rows), vocab, dtype=torch.int32) if counts is None else counts,
        prompt_seen=torch.zeros(len(rows), vocab, dtype=torch.bool) if prompt_seen is None else prompt_seen,
        any_sampled=any(row.temperature > 0 for row in rows),
        any_filter=any(row.filters for row in rows),
        any_penalty=any(row.penalties for row in rows),
        any_bias=any(row.biases for row in rows),
        bias_ids=torch.tensor([[*own, *[vocab - 1] * (BIASES - len(own))] for own in ids]),
        bias_values=torch.tensor([[*own, *[-0.0] * (BIASES - len(own))] for own in values]),
        banned_ids=torch.tensor(banned),
        ban_until=torch.tensor([row.ban_until for row in rows]),
        raw_logprobs=torch.zeros(len(rows), dtype=torch.bool),
        grammar=grammar,
    )


knobs = st.builds(
    Knobs,
    temperature=st.sampled_from((0.0, 0.05, 0.7, 1.0, 1.9)),
    top_k=st.sampled_from((0, 0, 1, 2, 3, 100)),
    top_p=st.sampled_from((1.0, 1.0, 1e-6, 0.37, 0.61, 0.83)),
    min_p=st.sampled_from((0.0, 0.0, 0.013, 0.21, 1.0)),
    frequency=st.sampled_from((0.0, 0.0, 0.3, -0.4)),
    presence=st.sampled_from((0.0, 0.0, 0.7, -1.1)),
    repetition=st.sampled_from((1.0, 1.0, 1.3, 0.6)),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 7),
    bias=st.sampled_from(((), (), ((0, 2.5),), ((0, -100.0), (1, 0.75)), ((0, 100.0), (1, -0.4)))),
    banned=st.sampled_from(((), (), (0,), (1, 0))),
    ban_until=st.integers(0, 3),
)
"""Rows whose cuts fall between any sums of probabilities that `LOGITS` gives, so that no rounding decides."""

WORDS = st.sampled_from((-1, -1, 0b10, 0b111, -2, 0))
"""Grammar masks of six tokens at most: all, one, three, all but the first, none."""

LOGITS = (0.0, 0.5, 0.5, 1.0, -1.0, -2.5, 3.0, 40.0, -math.inf, math.nan)
"""Logits that tie often; NaN counts as -inf."""


@dataclass(frozen=True)
class SamplingCase:
    """Rows of knobs, logits [B, M, V], what was written and read before, and draft paths [B, M, L]."""

    rows: list[Knobs]
    logits: Tensor
    counts: Tensor
    prompt_seen: Tensor
    path_tokens: Tensor
    path_valid: Tensor
    positions: Tensor  # [B, M]
    grammar: Tensor | None  # [B, M, 1]

    @property
    def batch(self) -> SamplingBatch:
        return sampling_batch(self.rows, self.logits.shape[-1], self.counts, self.prompt_seen, self.grammar)


@st.composite
def sampling_cases(draw: st.DrawFn) -> SamplingCase:
    """Small batches of every mixture of rows; unused path entries hold arbitrary numbers."""
    rows = draw(st.lists(knobs, min_size=1, max_size=3))
    nodes, vocab, length = draw(st.integers(1, 2)), draw(st.integers(2, 6)), draw(st.integers(0, 3))
    b = len(rows)

    def tensor(elements: st.SearchStrategy[object], *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        return torch.tensor(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype).view(shape)

    valid = tensor(st.booleans(), b, nodes, length, dtype=torch.bool)
    tokens = tensor(st.integers(0, vocab - 1), b, nodes, length, dtype=torch.int64)
    return SamplingCase(
        rows=rows,
        logits=tensor(st.sampled_from(LOGITS), b, nodes, vocab, dtype=torch.float64),
        counts=tensor(st.integers(0, 3), b, vocab, dtype=torch.int32),
        prompt_seen=tensor(st.booleans(), b, vocab, dtype=torch.bool),
        path_tokens=torch.where(valid, tokens, 10**9),
        path_valid=valid,
        positions=tensor(st.integers(0, 3), b, nodes, dtype=torch.int64),
        grammar=draw(st.none() | st.builds(lambda: tensor(WORDS, b, nodes, 1, dtype=torch.int32))),
    )
