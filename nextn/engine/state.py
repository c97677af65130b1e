"""All device memory of the engine besides the weights: the cache, one permanent row a request, step buffers.

Rows hold what survives a step; a step gathers from them by row number and writes them at its end only. The
last row is a scratch row: padding points there, so that a padded step needs no branches.

| part of a row's slots | holds                                                                      |
|-----------------------|----------------------------------------------------------------------------|
| 0 .. n-1              | target latents of tokens 0 .. n-1; committed                               |
| 0 .. draft_len-1      | NextN latents; entry i is the pair (h_i, t_{i+1}); draft_len <= n          |
| n .. n+D-1            | scratch: verification writes its D nodes here, commit moves the accepted   |

The token at index n is the *root*: chosen, but in no cache yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextn.config import MAX_TREE_NODES, ModelConfig
from nextn.engine.request import MAX_BANNED, MAX_BIASES, SamplingParams
from nextn.kernels.ref.sampling import SamplingBatch

RING = 32
"""Target states kept a row for the draft to catch up after plain decoding; at most MAX_TREE_NODES."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one decode step.

    rows: [B] int64. live: [B] bool, False for padding. pages: width of the page table that covers every
    row's prefix (host knowledge, so that a step reads no more than it needs). The flags say which sampling
    work any of the rows needs.
    """

    rows: Tensor
    live: Tensor
    pages: int
    any_sampled: bool = False
    any_filter: bool = False
    any_penalty: bool = False
    any_bias: bool = False
    any_logprobs: bool = False
    any_grammar: bool = False

    @property
    def size(self) -> int:
        """B, padding included."""
        return self.rows.shape[0]


REALS = ("temperature", "top_p", "min_p", "frequency", "presence", "repetition")
WHOLES = ("seed", "choice", "top_k", "ban_until")
SAMPLING_FIELDS = {
    "any_sampled": ("temperature", "seed", "choice"),
    "any_filter": ("top_k", "top_p", "min_p"),
    "any_penalty": ("frequency", "presence", "repetition", "counts", "prompt_seen"),
    "any_bias": ("bias_ids", "bias_values", "banned_ids", "ban_until"),
    "any_logprobs": ("raw_logprobs",),
}
"""What of a `SamplingBatch` each flag of a step calls for."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of every row, on the device; R rows and the scratch row.

    They are what `SamplingBatch` holds, in few tensors: each takes a launch to gather and one to write.
    """

    reals: Tensor  # [REALS, R + 1] float32
    wholes: Tensor  # [WHOLES, R + 1] int64
    counts: Tensor  # [R + 1, V] int32, chosen tokens, the root included
    prompt_seen: Tensor  # [R + 1, V] bool
    token_ids: Tensor  # [R + 1, 300 + 32] int64: biased ones, then banned ones, -1 where unused
    bias_values: Tensor  # [R + 1, 300] float32, -0.0 where unused
    raw_logprobs: Tensor  # [R + 1] bool

    @staticmethod
    def zeros(rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
        """Greedy rows with nothing counted."""
        # Unused entries add nothing, each to a token of its own: many sums to one would queue up.
        biased = (torch.arange(MAX_BIASES, device=device) % vocab_size).repeat(rows, 1)
        banned = torch.full((rows, MAX_BANNED), -1, dtype=torch.int64, device=device)
        reals = torch.zeros(len(REALS), rows, dtype=torch.float32, device=device)
        for neutral in ("top_p", "repetition"):  # of padding rows, which nobody sets
            reals[REALS.index(neutral)].fill_(1.0)
        return SamplingRows(
            reals=reals,
            wholes=torch.zeros(len(WHOLES), rows, dtype=torch.int64, device=device),
            counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            prompt_seen=torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
            token_ids=torch.cat((biased, banned), dim=1),
            bias_values=torch.full((rows, MAX_BIASES), -0.0, device=device),
            raw_logprobs=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def gather(self, rows: Tensor, wanted: Set[str]) -> dict[str, Any]:
        """Fields of a `SamplingBatch` of `rows` [B]: the `wanted` ones, the rest empty."""

        def pick(held: Tensor, dim: int, names: Iterable[str]) -> Tensor:
            if wanted.isdisjoint(names):
                return held.narrow(dim, 0, 0)
            return held.index_select(dim, rows)

        fields: dict[str, Any] = {}
        for names, held in ((REALS, self.reals), (WHOLES, self.wholes)):
            for name, values in zip(names, pick(held, 1, names), strict=True):
                fields[name] = values if name in wanted else values[:0]
        for name in ("counts", "prompt_seen", "bias_values", "raw_logprobs"):
            fields[name] = pick(getattr(self, name), 0, (name,))
        ids = pick(self.token_ids, 0, ("bias_ids", "banned_ids"))
        fields["bias_ids"], fields["banned_ids"] = ids.split((MAX_BIASES, MAX_BANNED), dim=1)
        return fields


class RowState:
    """The engine's device memory; see the table at the top of this file.

    cache: [layers + 1, pages, page_size, C]; the NextN layer is the last one.
    n, draft_len, root: [R + 1] int64. page_table: [R + 1, P] int64.
    draft_state: [R + 1, hidden], NextN's output (before shared_head.norm) for the last committed pair: it
        seeds the next tree.
    ring_hidden, ring_token: [R + 1, RING, hidden] and [R + 1, RING]; at index p % RING the target state h_p
        that the draft reads and the token t_{p+1}, for draft_len <= p < n.
    tail: [R + 1, 64, C], latents of the draft beam during one step.
    chain_mask: [64] int64, ancestor bits of a chain's nodes, a constant.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        max_rows: int,
        max_len: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = max_rows + 1
        width = -(-max_len // page_size)
        self.scratch_row = max_rows
        self.page_size = page_size
        self.device = device

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.cache = torch.empty(
            cfg.num_hidden_layers + 1, num_pages, page_size, cfg.latent_dim, dtype=dtype, device=device
        )
        self.n = whole(rows)
        self.draft_len = whole(rows)
        self.root = whole(rows)
        self.page_table = whole(rows, width)
        self.draft_state = real(rows, cfg.hidden_size)
        self.ring_hidden = real(rows, RING, cfg.hidden_size)
        self.ring_token = whole(rows, RING)
        self.tail = real(rows, MAX_TREE_NODES, cfg.latent_dim)
        self.chain_mask = _chain_mask(torch.arange(MAX_TREE_NODES, device=device))
        self.sampling = SamplingRows.zeros(rows, cfg.vocab_size, device)

    def upload(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """`values` on the device. To a GPU they go from pinned memory, so the host does not wait."""
        tensor = torch.tensor(values, dtype=dtype)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        choice: int,
        prompt: Sequence[int],
        output: Sequence[int],
        banned: Sequence[int] = (),
    ) -> None:
        """Start a row: sampling parameters, and counts of what a resumed request has already said.

        Single values are filled in: assigned, each would be copied from the host, which would wait for it.
        seed: 64 bits. choice: which of a request's answers this is; it separates their noise.
        banned: token ids that `min_tokens` holds back, at most 32.
        """
        sampling = self.sampling
        reals = (
            params.temperature, params.top_p, params.min_p, params.frequency_penalty,
            params.presence_penalty, params.repetition_penalty,
        )  # fmt: skip
        sampling.reals[:, row] = self.upload(reals, torch.float32)
        sampling.wholes[:, row] = self.upload((seed, choice, params.top_k, len(prompt) + params.min_tokens))
        sampling.raw_logprobs[row].fill_(params.raw_logprobs)
        self._set_bias(row, params, banned)
        self.n[row].zero_()
        self.draft_len[row].zero_()
        if params.needs_penalties:
            sampling.counts[row].zero_()
            sampling.prompt_seen[row].zero_().index_fill_(0, self.upload(prompt), True)
            if output:
                said = self.upload(output)
                sampling.counts[row].scatter_add_(0, said, torch.ones_like(said, dtype=torch.int32))

    def _set_bias(self, row: int, params: SamplingParams, banned: Sequence[int]) -> None:
        """Biases and bans of a row; every row of a batch that has any is read, so all are written."""
        sampling = self.sampling
        sampling.bias_values[row].fill_(-0.0)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            sampling.token_ids[row, : len(ids)] = self.upload(ids)
            sampling.bias_values[row, : len(ids)] = self.upload(values, torch.float32)
        sampling.token_ids[row, MAX_BIASES:].fill_(-1)
        if banned:
            sampling.token_ids[row, MAX_BIASES : MAX_BIASES + len(banned)] = self.upload(banned)

    def set_pages(self, row: int, pages: Sequence[int], first: int = 0) -> None:
        """Write `pages[first:]` into the row's page table."""
        if first < len(pages):
            self.page_table[row, first : len(pages)] = self.upload(pages[first:])

    def slots(self, page_table: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions; the rows' page_table [B, P], positions [B, M] -> [B, M] int64.

        Positions past the end of the page table (of padding, or of nodes that are not valid) give the slot
        of the last page; nothing is written there.
        """
        page = (positions // self.page_size).clamp_(max=page_table.shape[1] - 1)
        return page_table.gather(1, page) * self.page_size + positions % self.page_size

    def sampling_batch(self, batch: StepBatch) -> SamplingBatch:
        """Gather the rows' sampling parameters: those that the batch's flags call for, the rest empty."""
        flags = {flag: getattr(batch, flag) for flag in SAMPLING_FIELDS}
        wanted = {name for flag, names in SAMPLING_FIELDS.items() if flags[flag] for name in names}
        return SamplingBatch(**self.sampling.gather(batch.rows, wanted), **flags)


def _chain_mask(steps: Tensor) -> Tensor:
    """Ancestor bits of a chain: node j sees nodes 0 .. j. steps: arange(M), M <= 64 -> [M] int64."""
    own = torch.ones_like(steps) << steps
    return own | (own - 1)  # for j = 63 the subtraction wraps around, as it should
