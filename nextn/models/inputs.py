"""What one forward pass needs, as plain data: one small type for each kind of pass.

Legend: R requests in a prefill, T their tokens end to end, B rows in a decode, M nodes a row, P pages a
row, E entries of a tail (E <= 64), C = kv_lora_rank + qk_rope_head_dim. A *slot* is a flat position in one
layer's cache: page * page_size + offset. Every node attends the first `prefix_lens` slots of its row's
pages and, of the tail, exactly the entries whose bit is set in its `mask`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """Consecutive tokens of several requests; each attends its own prefix, itself and what precedes it."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, where each token's latent is written
    page_table: Tensor  # [R, P] int64
    cu_seqlens: tuple[int, ...]  # R + 1 offsets into T
    prefix_lens: tuple[int, ...]  # R lengths already in the cache before these tokens


@dataclass(frozen=True, slots=True)
class TreeInput:
    """Nodes whose latents go to the page cache: verification (a tree) and draft extension (a chain).

    The tail is the M nodes themselves, so E = M and bit j of `mask` stands for node j of the same row.
    A node with `valid` False is inert: it is not written, reads no expert, and its output is undefined
    but finite (its mask holds its own bit, so that its softmax has one entry).
    """

    tokens: Tensor  # [B, M] int64
    positions: Tensor  # [B, M] int64
    mask: Tensor  # [B, M] int64 bit set over the row's M nodes
    valid: Tensor  # [B, M] bool
    slots: Tensor  # [B, M] int64
    prefix_lens: Tensor  # [B] int64
    page_table: Tensor  # [B, P] int64; P may be cut to the longest prefix, so never read a page beyond it


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One level of the draft beam, whose latents go to a step buffer instead of pages.

    The nodes' latents are written to `tail[:, start : start + M]`; entries from `start + M` on hold
    nothing yet, and no mask bit names them.
    """

    tokens: Tensor  # [B, M] int64
    positions: Tensor  # [B, M] int64
    mask: Tensor  # [B, M] int64 bit set over the tail's entries
    tail: Tensor  # [B, E, C]
    start: int
    prefix_lens: Tensor  # [B] int64
    page_table: Tensor  # [B, P] int64
