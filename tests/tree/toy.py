"""A toy engine for the laws: target and draft are tables of logits after the last two tokens.

It runs the same functions as the engine, in the same order, for many seeds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.kernels.ref.sampling import SamplingBatch, child_values, perturb, pick, process_logits
from nextn.tree import grow
from nextn.tree.accept import Accepted, accept
from nextn.tree.tree import DraftTree
from tests.strategies import Knobs, sampling_batch

PROMPT = (1, 2)
"""The last two tokens of every prompt; the second is the first root."""


@dataclass(frozen=True)
class Toy:
    """Logits [V, V, V] by the last two tokens, of the target and of the draft."""

    target: Tensor
    draft: Tensor

    @staticmethod
    def random(vocab: int, seed: int, noise: float = 1.0) -> Toy:
        """A random target, and a draft that differs from it by `noise` standard deviations a logit."""
        generator = torch.Generator().manual_seed(seed)
        target, error = torch.randn(2, vocab, vocab, vocab, generator=generator, dtype=torch.float64)
        return Toy(1.5 * target, 1.5 * target + noise * error)

    @property
    def vocab(self) -> int:
        return self.target.shape[0]


@dataclass(frozen=True)
class Run:
    """tokens [B, n] emitted, and how many draft tokens a cycle were accepted on average in a row [B]."""

    tokens: Tensor
    accepted: Tensor


def run(
    toy: Toy,
    rows: Sequence[Knobs],
    length: int,
    spec: SpecConfig | None,
    coupled: bool = True,
    grammar: Tensor | None = None,
) -> Run:
    """Emit `length` tokens a row, by plain decoding where `spec` is None.

    grammar: [V, 1] int32, the tokens that may follow each token; only verification knows it.
    """
    b = len(rows)
    batch = sampling_batch(rows, toy.vocab)
    batch.prompt_seen[:, list(PROMPT)] = True
    last = torch.tensor(PROMPT).expand(b, 2)  # [B, 2]
    width = spec.width if spec else 1
    out = torch.zeros(b, length + width, dtype=torch.int64)
    done = torch.zeros(b, dtype=torch.int64)  # tokens emitted; the root stands at position done + 1
    cycles = torch.zeros(b)
    while int(done.min()) < length:
        tree = draft_tree(toy, batch, last, done + 2, spec, coupled) if spec else DraftTree.plain(last[:, 1])
        masked = batch if grammar is None else replace(batch, grammar=grammar[tree.tokens])
        accepted = verify(toy, masked, last, done + 2, tree, width)
        running = done < length
        last, done = commit(batch, accepted, out, last, done, running)
        cycles += running
    return Run(out[:, :length], done / cycles - 1)


def draft_tree(
    toy: Toy, batch: SamplingBatch, last: Tensor, first: Tensor, spec: SpecConfig, coupled: bool
) -> DraftTree:
    """Grow a tree below the root `last[:, 1]`, whose children choose the token of position `first` [B]."""

    def children(paths: Tensor, valid: Tensor, level: int) -> tuple[Tensor, Tensor]:
        positions = (first + level - 1).unsqueeze(1).expand(paths.shape[:2])
        context = torch.cat((last.unsqueeze(1).expand(-1, paths.shape[1], -1), paths), dim=-1)[..., -2:]
        logp = process_logits(toy.draft[context[..., 0], context[..., 1]], batch, paths, valid, positions)
        if not coupled:
            return grow.top_children(logp, logp, spec.topk)
        scores = perturb(logp, batch, positions[:, :1])
        return grow.top_children(scores, child_values(scores, logp, batch), spec.topk)

    tokens, values = children(*DraftTree.plain(last[:, 1]).path_tokens(), level=1)
    growth = grow.start(tokens[:, 0], values[:, 0], spec)
    while growth.level < spec.num_steps:
        beam = growth.beam()
        growth.extend(*children(beam.path_tokens, beam.path_valid, level=beam.level + 1))
    return growth.rerank(last[:, 1])


def verify(
    toy: Toy, batch: SamplingBatch, last: Tensor, first: Tensor, tree: DraftTree, width: int
) -> Accepted:
    """The target's choice after every node, and the longest path on which the draft agrees."""
    parent = tree.tokens.gather(1, tree.parents.clamp(min=0))
    before = torch.where(tree.parents < 0, last[:, :1], parent)
    positions = first.unsqueeze(1) + tree.depth
    logp = process_logits(toy.target[before, tree.tokens], batch, *tree.path_tokens(), positions)
    scores = perturb(logp, batch, positions)
    return accept(tree, pick(scores), width)


def commit(
    batch: SamplingBatch, accepted: Accepted, out: Tensor, last: Tensor, done: Tensor, running: Tensor
) -> tuple[Tensor, Tensor]:
    """Append what was emitted to running rows and count it; returns the new last two tokens and lengths."""
    emitted = accepted.valid & running.unsqueeze(1)
    slots = torch.arange(accepted.tokens.shape[1])
    rows, columns = emitted.nonzero(as_tuple=True)
    tokens = accepted.tokens[rows, columns]
    out[rows, done[rows] + slots[columns]] = tokens
    batch.counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
    done = done + torch.where(running, accepted.length, 0)
    history = torch.cat((torch.tensor(PROMPT).expand(out.shape[0], 2), out), dim=1)
    return history.gather(1, done.unsqueeze(1) + torch.arange(2)), done


def exact_law(toy: Toy, knobs: Knobs, length: int) -> Tensor:
    """The probability of every text of `length` tokens, [V] * length, for knobs without penalties."""
    batch = sampling_batch([knobs], toy.vocab)
    nothing = torch.zeros(1, toy.vocab**2, 0, dtype=torch.int64)

    def step(position: int) -> Tensor:
        """[V, V, V] probability of the third token, at `position`, after the first two."""
        where = nothing[..., :1].sum(-1) + position
        logits = toy.target.flatten(0, 1).unsqueeze(0)
        return process_logits(logits, batch, nothing, nothing.bool(), where).exp().view(toy.target.shape)

    law = step(len(PROMPT))[PROMPT]  # [V]
    previous = torch.full((toy.vocab,), PROMPT[1])
    texts = torch.arange(toy.vocab)
    for position in range(len(PROMPT) + 1, len(PROMPT) + length):
        law = (law.unsqueeze(1) * step(position)[previous, texts]).flatten()
        previous, texts = texts.repeat_interleave(toy.vocab), torch.arange(toy.vocab).repeat(texts.shape[0])
    return law


def seeds(knobs: Knobs, count: int) -> list[Knobs]:
    """The same knobs under `count` different seeds."""
    return [replace(knobs, seed=seed) for seed in range(count)]
