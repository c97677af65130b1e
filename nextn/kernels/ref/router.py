"""Choice of experts: DeepSeek-V3's sigmoid router with groups and a correction bias, V2's softmax routers.

Equal values go to the lower number, of an expert or a group, so that every device chooses alike.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype

MAX_EXPERTS = 1024
"""What the kernel takes: one warp holds all scores of a token."""

Scoring = Literal["sigmoid", "softmax"]
Method = Literal["noaux_tc", "greedy", "group_limited_greedy"]


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    *,
    scoring: Scoring,
    method: Method,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, best first.  # [N, k] float32 or float64, [N, k] int64

    x [N, hidden] and weight [experts, hidden] are multiplied in float32 (float64 for float64 x). Tokens not
    `valid` [N] get weights 0 and numbers -1; their x may be NaN.
    """
    wide = accumulation_dtype(x.dtype)
    weights, indices = route(
        F.linear(x.to(wide), weight.to(wide)),
        bias,
        scoring=scoring,
        method=method,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling=scaling,
    )
    if valid is None:
        return weights, indices
    kept = valid.unsqueeze(-1)
    return torch.where(kept, weights, 0), torch.where(kept, indices, -1)


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    scoring: Scoring,
    method: Method,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the `top_k` best experts of each token.  # [N, k] logits' dtype, [N, k] int64

    logits [N, experts] are float32 or float64. `noaux_tc` chooses by score + bias, among the `topk_group`
    groups whose two best experts have the largest sum; `group_limited_greedy` ranks groups by their best
    expert; `greedy` knows no groups. Weights are scores without the bias. (DeepSeek-V3 report, 2.1.2.)
    """
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(choice.isnan(), float("-inf"))  # which would be the largest of all
    if method != "greedy" and n_group > 1:
        choice = _keep_best_groups(choice, n_group, topk_group, best=2 if method == "noaux_tc" else 1)
    indices = _best(choice, top_k)
    weights = scores.gather(-1, indices)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, indices


def _keep_best_groups(choice: Tensor, n_group: int, topk_group: int, best: int) -> Tensor:
    """-inf for every expert outside of the `topk_group` groups of largest sum of their `best` experts.

    Not 0, which would beat an expert of a kept group whose bias makes its score negative.
    """
    grouped = choice.view(-1, n_group, choice.shape[-1] // n_group)  # [N, groups, experts a group]
    group_scores = grouped.topk(best, sorted=False).values.sum(-1)
    kept = _best(group_scores, topk_group)
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(choice.shape)


def _best(values: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest values of the last dimension; of equal ones the lower number first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
