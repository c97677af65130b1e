"""What multi-head latent attention does between its projections and the attention itself, for decode.

The down projection becomes the query's input and the cache entry; the up-projected query meets the keys'
up-projection (is absorbed), so that it can be compared with latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nextn.kernels.ref.kv_cache import write_latents
from nextn.kernels.ref.norm import rms_norm, sum_summands
from nextn.kernels.ref.rope import RotaryTables, apply_rope, rope_rows


def prepare_latents(
    summands: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor,
    eps: float,
    rotary: RotaryTables,
    positions: Tensor,
    slots: Tensor | None,
    valid: Tensor | None,
    cache_layer: Tensor,
    tail: Tensor,
) -> Tensor | None:
    """Normalise both halves of the down projection, rotate the key, store entries.  # [N, q_lora] or None

    summands [S, N, q_lora + C] hold the rows of q_a (none if q_norm is None: q_lora = 0), then kv_lora rows
    of latents, then the shared key. The entry [latent, key] of every node goes to tail [B, M, C], N = B * M,
    and to cache_layer [pages, page_size, C] at `slots` [N] int64 where `valid` [N]; slots None: not there.
    positions [N] int64. The dtype of all that leaves is that of kv_norm [kv_lora]; each is rounded once.
    """
    q_lora = 0 if q_norm is None else q_norm.shape[0]
    kv_lora, dtype = kv_norm.shape[0], kv_norm.dtype
    down = sum_summands(summands)  # [N, q_lora + C]
    q_in = None if q_norm is None else _norm_wide(down[:, :q_lora], q_norm, eps)
    down = down[:, q_lora:]
    key = _rotate(down[:, None, kv_lora:], rotary, positions).squeeze(1)
    entries = torch.cat((_norm_wide(down[:, :kv_lora], kv_norm, eps), key.to(dtype)), -1)
    tail.copy_(entries.view(tail.shape))
    if slots is not None:
        write_latents(cache_layer, slots, entries, valid)
    return q_in


def absorb_queries(summands: Tensor, w_uk: Tensor, rotary: RotaryTables, positions: Tensor) -> Tensor:
    """Queries in latent space: [q_nope @ w_uk, rotated q_pe] a head.  # [N, H, kv_lora + rope]

    summands [S, N, H * (nope + rope)], w_uk [H, nope, kv_lora], positions [N] int64. q_nope is rounded to
    w_uk's dtype before the product; the result has that dtype.
    """
    heads, nope, _ = w_uk.shape
    total = sum_summands(summands)
    q = total.view(total.shape[0], heads, -1)  # [N, H, nope + rope]
    q_nope = q[..., :nope].to(w_uk.dtype)
    absorbed = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)  # [N, H, kv_lora]
    return torch.cat((absorbed, _rotate(q[..., nope:], rotary, positions).to(w_uk.dtype)), -1)


def _norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of x in its own dtype, rounded to the weight's."""
    return rms_norm(x, weight.to(x.dtype), eps).to(weight.dtype)


def _rotate(x: Tensor, rotary: RotaryTables, positions: Tensor) -> Tensor:
    """x [N, heads, rope] turned to its tokens' positions."""
    rows = rope_rows(rotary.cos, rotary.sin, positions, interleave=rotary.interleave)
    return apply_rope(x, *rows, interleave=rotary.interleave)
