"""The tree algorithm in plain Python over lists, one request at a time: read it first.

The tensor files do the same for a batch; the tests hold them to this one. Sources: growth and rerank are
EAGLE-2 (arXiv 2406.16858); acceptance follows the target's own choices, so it is exact by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nextn.config import SpecConfig

Children = Callable[[tuple[int, ...]], Sequence[tuple[int, float]]]
"""The draft model: path of tokens below the root -> (token, log-probability) of every possible child."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One drafted token; its number is its index in the pool."""

    token: int
    value: float  # log-probabilities summed along the path
    parent: int  # number of the parent candidate, -1 for the root's children
    path: tuple[int, ...]  # tokens below the root, down to this one


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in order, the root first; `parents` is -1 at the root, `masks` are sets of bits."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    masks: list[int]
    values: list[float]


def log_value(value: float) -> float:
    """NaN as -inf, and nothing above 0."""
    return -math.inf if math.isnan(value) else min(value, 0.0)


def top_children(children: Sequence[tuple[int, float]], k: int) -> list[tuple[int, float]]:
    """The k best (token, score), ties to the lower token id, NaN as -inf."""
    clean = [(token, -math.inf if math.isnan(score) else score) for token, score in children]
    return sorted(clean, key=lambda child: (-child[1], child[0]))[:k]


def grow(children: Children, spec: SpecConfig) -> tuple[list[Candidate], list[list[int]]]:
    """All candidates in flat order, and the beams of levels 1 .. S-1 as lists of candidate numbers.

    Every beam candidate gets its k best children; the next beam is the k best of the new level alone.
    """
    k = spec.topk
    pool = [Candidate(token, log_value(p), -1, (token,)) for token, p in top_children(children(()), k)]
    beams: list[list[int]] = []
    beam = list(range(k))
    for _ in range(spec.num_steps - 1):
        beams.append(beam)
        first = len(pool)
        for parent in beam:
            above = pool[parent]
            for token, p in top_children(children(above.path), k):
                pool.append(Candidate(token, above.value + log_value(p), parent, (*above.path, token)))
        beam = best(pool, range(first, len(pool)), k)
    return pool, beams


def best(pool: Sequence[Candidate], numbers: Sequence[int], count: int) -> list[int]:
    """The `count` numbers of highest value, in descending order; ties to the lower number."""
    return sorted(numbers, key=lambda number: (-pool[number].value, number))[:count]


def rerank(pool: Sequence[Candidate], spec: SpecConfig) -> list[int]:
    """The D-1 best candidates of all levels, ascending.

    A parent is worth at least as much as its child and has the lower number, so it is always among them.
    """
    return sorted(best(pool, range(len(pool)), spec.draft_tokens - 1))


def build(root: int, pool: Sequence[Candidate], chosen: Sequence[int]) -> Tree:
    """Number the chosen candidates 1, 2, ... in ascending order below node 0, the root."""
    node_of = {-1: 0} | {number: node for node, number in enumerate(chosen, start=1)}
    tree = Tree([root], [-1], [0], [1], [0.0])
    for node, number in enumerate(chosen, start=1):
        parent = node_of[pool[number].parent]
        tree.tokens.append(pool[number].token)
        tree.parents.append(parent)
        tree.depths.append(tree.depths[parent] + 1)
        tree.masks.append(tree.masks[parent] | 1 << node)
        tree.values.append(pool[number].value)
    return tree


def draft(root: int, children: Children, spec: SpecConfig) -> Tree:
    """Grow, rerank and build."""
    pool, _ = grow(children, spec)
    return build(root, pool, rerank(pool, spec))


def beam_masks(pool: Sequence[Candidate], beams: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each beam node, the step-buffer entries it attends: its ancestors below the root and itself.

    The buffer holds the beams end to end.
    """
    entry_of = {number: entry for entry, number in enumerate(n for beam in beams for n in beam)}

    def mask(number: int) -> int:
        return 0 if number < 0 else mask(pool[number].parent) | 1 << entry_of[number]

    return [[mask(number) for number in beam] for beam in beams]


def accept(tree: Tree, target: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Node numbers walked over from the root, and the tokens emitted (as many, at most `width`).

    `target` holds the target's token after each node. While a child carries that token it is accepted;
    the last token is the target's own and needs no child.
    """
    path = [0]
    emitted = [target[0]]
    while len(path) < width:
        here = path[-1]
        children = (node for node, parent in enumerate(tree.parents) if parent == here)
        child = next((node for node in children if tree.tokens[node] == target[here]), None)
        if child is None:
            break
        path.append(child)
        emitted.append(target[child])
    return path, emitted
