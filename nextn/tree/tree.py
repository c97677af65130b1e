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

    def paths(self) -> tuple[Tensor, Tensor]:
        """Each node's ancestors from depth 1 down to the node itself, without the root.

        Returns nodes [B, D, levels] int64 (0 where unused) and valid [B, D, levels] bool: entry l holds
        the ancestor at depth l + 1 and is valid where l < depth.
        """
        up = self.parents.clamp(min=0)
        node = torch.arange(self.size, device=up.device).expand_as(up)
        steps = torch.arange(self.levels, device=up.device)
        valid = steps < self.depth.unsqueeze(-1)
        chain = []
        for _ in range(self.levels):
            chain.append(node)
            node = up.gather(1, node)
        if not chain:
            return torch.zeros_like(valid, dtype=torch.int64), valid
        upward = torch.stack(chain, dim=-1)  # [B, D, levels], the node first
        downward = upward.gather(-1, (self.depth.unsqueeze(-1) - 1 - steps).clamp(min=0))
        return torch.where(valid, downward, 0), valid

    def path_tokens(self) -> tuple[Tensor, Tensor]:
        """Tokens [B, D, levels] int64 of `paths` (0 where unused) and their validity [B, D, levels] bool."""
        nodes, valid = self.paths()
        tokens = self.tokens.gather(1, nodes.flatten(1)).view_as(nodes)
        return torch.where(valid, tokens, 0), valid

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
