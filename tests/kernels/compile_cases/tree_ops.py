"""Launches of kernels/tree_ops.py: a small tree, the widest, and the deepest."""

from __future__ import annotations

import torch

from nextn.config import SpecConfig
from nextn.kernels import tree_ops
from nextn.kernels.ref.tree_ops import Pool


def _grow(shape: str, dtype: torch.dtype) -> None:
    spec = SpecConfig.parse(shape)
    k = spec.topk
    values = torch.zeros(2, k, dtype=dtype)
    pool = Pool.empty(values, spec.num_steps)
    beam = tree_ops.expand(torch.zeros(2, 1, k, dtype=torch.int64), values.unsqueeze(1), None, pool, 1)
    for level in range(2, spec.num_steps + 1)[-2:]:
        assert beam is not None
        beam = beam._replace(path_tokens=torch.zeros(2, k, level - 1, dtype=torch.int64))
        tokens = torch.zeros(2, k, k, dtype=torch.int64)
        beam = tree_ops.expand(tokens, tokens.to(dtype), beam, pool, level)
    tree_ops.rerank(torch.zeros(2, dtype=torch.int64), pool, k, spec.draft_tokens)


def small_tree_float32() -> None:
    _grow("3/4/8", torch.float32)


def one_child_float32() -> None:
    _grow("1/1/2", torch.float32)


def many_nodes_float32() -> None:
    _grow("5/8/64", torch.float32)


def widest_tree_float64() -> None:
    _grow("2/64/64", torch.float64)


def wide_beam_float32() -> None:
    _grow("3/32/64", torch.float32)


def longest_chain_float64() -> None:
    _grow("63/1/64", torch.float64)


def accept() -> None:
    for nodes, width in ((1, 1), (4, 3), (64, 64)):
        tokens = torch.zeros(2, nodes, dtype=torch.int64)
        tree_ops.accept_path(tokens, tokens, tokens, width)
