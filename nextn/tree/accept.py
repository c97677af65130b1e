"""Lossless acceptance: follow the target's own token from node to node until the draft has no such child.

The noise of sampling depends only on the request's seed and the absolute position, so the token that the
target would choose after each node is known for all nodes at once (`target_tokens`), greedy or sampled.
The emitted text is then what plain decoding would emit, whatever the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.kernels.ops import accept_path
from nextn.tree.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a cycle emits: the accepted draft tokens, then the target's own (bonus) token."""

    path: Tensor  # [B, W] int64 node numbers from the root; padded entries repeat the last accepted node
    length: Tensor  # [B] int64, tokens emitted = nodes of the path, 1 .. W
    tokens: Tensor  # [B, W] int64 tokens emitted; padded entries repeat the bonus token

    @property
    def valid(self) -> Tensor:
        """[B, W] bool: which entries are not padding."""
        return torch.arange(self.path.shape[1], device=self.path.device) < self.length.unsqueeze(1)


def accept(tree: DraftTree, target_tokens: Tensor, width: int) -> Accepted:
    """Accept the longest path of `tree` on which every node carries the target's choice at its parent.

    target_tokens [B, D] int64: the target's token after each node. `width` W is the most tokens to emit,
    min(S, D-1) + 1 for a whole tree.
    """
    path, length, tokens = accept_path(tree.tokens, tree.parents, target_tokens, width)
    return Accepted(path=path, length=length, tokens=tokens)


def simulated(tree: DraftTree, length: Tensor, target_tokens: Tensor, width: int) -> Accepted:
    """Pretend that nodes 0 .. length-1 were accepted; for benchmarks whose weights mean nothing.

    length [B] int64 is clamped to 1 .. min(W, D). The path runs through the nodes in node order (they need
    not descend from each other); the tokens are those of nodes 1 .. length-1, then the target's after the
    last.
    """
    length = length.clamp(min=1, max=min(width, tree.size))
    last = length.unsqueeze(1) - 1  # [B, 1]
    order = torch.arange(width, device=length.device).expand(length.shape[0], -1)  # [B, W]
    draft = tree.tokens.gather(1, torch.minimum(order + 1, last))
    bonus = target_tokens.gather(1, last)
    return Accepted(torch.minimum(order, last), length, torch.where(order < last, draft, bonus))
