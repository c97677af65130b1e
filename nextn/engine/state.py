"""All device memory of the engine besides the weights: the cache, one permanent row a request, step buffers.

Rows hold what survives a step; a step gathers from them by row number and only `commit` writes them. The last
row is a scratch row: padding points there, so that a padded step needs no branches.

| part of a row's slots | holds                                                                      |
|-----------------------|----------------------------------------------------------------------------|
| 0 .. n-1              | target latents of tokens 0 .. n-1; committed                               |
| 0 .. draft_len-1      | NextN latents; entry i is the pair (h_i, t_{i+1}); draft_len <= n          |
| n .. n+D-1            | scratch: verification writes its D nodes here, commit moves the accepted   |

The token at index n is the *root*: chosen, but in no cache yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of every row, on the device; R rows and the scratch row.

    The fields are those of `SamplingBatch`, which `sampling_batch` gathers by name.
    """

    temperature: Tensor  # [R + 1] float32
    top_k: Tensor  # [R + 1] int64, 0 is off
    top_p: Tensor  # [R + 1] float32
    min_p: Tensor  # [R + 1] float32
    frequency: Tensor  # [R + 1] float32
    presence: Tensor  # [R + 1] float32
    repetition: Tensor  # [R + 1] float32
    seed: Tensor  # [R + 1] int64
    choice: Tensor  # [R + 1] int64
    counts: Tensor  # [R + 1, V] int32, chosen tokens, the root included
    prompt_seen: Tensor  # [R + 1, V] bool
    bias_ids: Tensor  # [R + 1, 300] int64
    bias_values: Tensor  # [R + 1, 300] float32, -0.0 where unused
    banned_ids: Tensor  # [R + 1, 32] int64, -1 where unused
    ban_until: Tensor  # [R + 1] int64
    raw_logprobs: Tensor  # [R + 1] bool

    @staticmethod
    def zeros(rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
        """Greedy rows with nothing counted."""

        def real(value: float = 0.0) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        def whole() -> Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return SamplingRows(
            real(), whole(), real(1.0), real(), real(), real(), real(1.0), whole(), whole(),
            torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
            # Unused entries add nothing, each to a token of its own: many sums to one would queue up.
            (torch.arange(MAX_BIASES, device=device) % vocab_size).repeat(rows, 1),
            torch.full((rows, MAX_BIASES), -0.0, device=device),
            torch.full((rows, MAX_BANNED), -1, dtype=torch.int64, device=device), whole(),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )  # fmt: skip


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

        seed: 64 bits. choice: which of a request's answers this is; it separates their noise.
        banned: token ids that `min_tokens` holds back, at most 32.
        """
        sampling = self.sampling
        sampling.temperature[row] = params.temperature
        sampling.top_k[row] = params.top_k
        sampling.top_p[row] = params.top_p
        sampling.min_p[row] = params.min_p
        sampling.frequency[row] = params.frequency_penalty
        sampling.presence[row] = params.presence_penalty
        sampling.repetition[row] = params.repetition_penalty
        sampling.seed[row] = seed
        sampling.choice[row] = choice
        sampling.raw_logprobs[row] = params.raw_logprobs
        self._set_bias(row, params, len(prompt), banned)
        self.n[row] = 0
        self.draft_len[row] = 0
        if params.needs_penalties:
            sampling.counts[row] = 0
            sampling.prompt_seen[row] = False
            sampling.prompt_seen[row, self.upload(prompt)] = True
            if output:
                said = self.upload(output)
                sampling.counts[row].scatter_add_(0, said, torch.ones_like(said, dtype=torch.int32))

    def _set_bias(self, row: int, params: SamplingParams, prompt: int, banned: Sequence[int]) -> None:
        """Biases and bans of a row; every row of a batch that has any is read, so all are written."""
        sampling = self.sampling
        sampling.bias_values[row] = -0.0
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            sampling.bias_ids[row, : len(ids)] = self.upload(ids)
            sampling.bias_values[row, : len(ids)] = self.upload(values, torch.float32)
        sampling.banned_ids[row] = -1
        if banned:
            sampling.banned_ids[row, : len(banned)] = self.upload(banned)
        sampling.ban_until[row] = prompt + params.min_tokens

    def set_pages(self, row: int, pages: Sequence[int], first: int = 0) -> None:
        """Write `pages[first:]` into the row's page table."""
        if first < len(pages):
            self.page_table[row, first : len(pages)] = self.upload(pages[first:])

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target) pairs, in every layer: the device's part of copy on write."""
        if copies:
            source, target = self.upload([page for pair in zip(*copies, strict=True) for page in pair]).chunk(
                2
            )
            self.cache[:, target] = self.cache[:, source]

    def slots(self, page_table: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions; the rows' page_table [B, P], positions [B, M] -> [B, M] int64.

        Positions past the end of the page table (of padding, or of nodes that are not valid) give the slot
        of the last page; nothing is written there.
        """
        page = (positions // self.page_size).clamp_(max=page_table.shape[1] - 1)
        return page_table.gather(1, page) * self.page_size + positions % self.page_size

    def sampling_batch(self, batch: StepBatch) -> SamplingBatch:
        """Gather the rows' sampling parameters: those that the batch's flags call for, the rest empty."""
        flags = {
            "any_sampled": ("temperature", "seed", "choice"),
            "any_filter": ("top_k", "top_p", "min_p"),
            "any_penalty": ("frequency", "presence", "repetition", "counts", "prompt_seen"),
            "any_bias": ("bias_ids", "bias_values", "banned_ids", "ban_until"),
            "any_logprobs": ("raw_logprobs",),
        }
        gathered = {}
        for flag, names in flags.items():
            for name in names:
                held = getattr(self.sampling, name)
                gathered[name] = held[batch.rows] if getattr(batch, flag) else held[:0]
        return SamplingBatch(**gathered, **{flag: getattr(batch, flag) for flag in flags})


def _chain_mask(steps: Tensor) -> Tensor:
    """Ancestor bits of a chain: node j sees nodes 0 .. j. steps: arange(M), M <= 64 -> [M] int64."""
    own = torch.ones_like(steps) << steps
    return own | (own - 1)  # for j = 63 the subtraction wraps around, as it should
