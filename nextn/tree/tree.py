"""A batch of draft trees as plain tensors, all with the same number of nodes.

Node 0 is the root: the last committed token. A parent's number is below its children's, and siblings
carry distinct tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.config import MAX_TREE_NODES

_ALL = (1 << MAX_TREE_NODES) - 1  # a mask's bits as an unsigned number


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees of D <= 64 nodes; `levels` bounds every depth and is known on the host."""

    tokens: Tensor  # [B, D] int64
    parents: Tensor  # [B, D] int64, -1 at the root
    depth: Tensor  # [B, D] int64, 0 at the root; a node's position is the root's plus its depth
    mask: Tensor  # [B, D] int64, bit = node number, for the node itself and its ancestors
    logp: Tensor  # [B, D] float, sum of the log-values along the path; 0 at the root
    levels: int

    @staticmethod
    def chain(tokens: Tensor, logp: Tensor | None = None) -> DraftTree:
        """A tree in which each node is the only child of the one before; tokens [B, D], the root first."""
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        bits = torch.bitwise_left_shift(torch.ones_like(nodes), nodes)
        return DraftTree(
            tokens=tokens,
            parents=nodes - 1,
            depth=nodes,
            mask=bits.cumsum(dim=1),  # distinct bits: the sum is their union
            logp=torch.zeros(tokens.shape, device=tokens.device) if logp is None else logp,
            levels=tokens.shape[1] - 1,
        )

    @staticmethod
    def plain(root: Tensor) -> DraftTree:
        """Trees of the root alone, so that plain decoding is accepted by the same code; root [B] int64."""
        return DraftTree.chain(root.unsqueeze(1))

    @property
    def size(self) -> int:
        """Nodes a tree, the root included."""
        return self.tokens.shape[1]

    def path_tokens(self) -> tuple[Tensor, Tensor]:
        """The tokens below the root, for every node, and which of them are the node's ancestors or its own.

        [B, D, D-1] int64 and bool.
        """
        below = torch.arange(1, self.size, device=self.mask.device)
        valid = ((self.mask.unsqueeze(-1) >> below) & 1).bool()
        return self.tokens[:, None, 1:].expand_as(valid), valid

    def check(self) -> None:
        """Assert every invariant of the class. Reads tensors on the host: for tests and debugging."""
        assert 1 <= self.size <= MAX_TREE_NODES
        rows = (self.tokens, self.parents, self.depth, self.mask, self.logp)
        assert {field.shape for field in rows} == {self.tokens.shape}
        for tokens, parents, depth, mask, logp in zip(*(field.tolist() for field in rows), strict=True):
            assert (parents[0], depth[0], mask[0] & _ALL, logp[0]) == (-1, 0, 1, 0)
            siblings: set[tuple[int, int]] = set()
            for node in range(1, self.size):
                parent = parents[node]
                assert 0 <= parent < node, f"node {node} has parent {parent}"
                assert depth[node] == depth[parent] + 1 <= self.levels, f"node {node} has depth {depth[node]}"
                assert mask[node] & _ALL == mask[parent] & _ALL | 1 << node, f"mask of node {node}"
                assert logp[node] <= logp[parent], f"node {node} outranks its parent"
                siblings.add((parent, tokens[node]))
            assert len(siblings) == self.size - 1, "two siblings carry the same token"
