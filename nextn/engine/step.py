"""The decode steps: `plain_step` and `spec_step` (draft, verify, accept, commit).

`draft`, `verify` and `accept` write step buffers and scratch slots only. What a step decided changes rows
and caches behind them, in `commit` or, of plain steps, in `_remember` and `_advance`: nothing is undone.
Inside a decode step nothing is read back to the host. A row whose model computes no finite logit emits
NO_TOKEN, on which the engine ends it; a row stores real tokens only. So does a row whose grammar allows
nothing, but only where that node is on the accepted path.

A decode step has three parts, `draft_part`, `verify` and `accept_part`. Between the first and the last
the host can compute what depends on the tree: the grammar's masks. Else they run as one.

Legend: B rows, D tree nodes, k beam width, S levels, W = min(S, D-1)+1 tokens a cycle at most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.engine.state import RING, RowState, StepBatch
from nextn.kernels.ops import adjust_logits, best_children, chosen_logprobs, compact, level_noise, pick_tokens
from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.sampling import SamplingBatch
from nextn.models.deepseek import States
from nextn.models.inputs import DraftInput, TreeInput
from nextn.models.weights import Models
from nextn.tree import accept as tree_accept
from nextn.tree import grow
from nextn.tree.accept import Accepted
from nextn.tree.tree import DraftTree

Mark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Choices that hold for a whole engine.

    coupled: rank the draft's children with the noise that will choose the target's token. tau: divides the
    perturbed scores where a path's value is computed from them. post_norm: the draft reads the target's
    state after model.norm, and recycles its own after shared_head.norm; else both before.
    """

    coupled: bool = True
    tau: float = 1.0
    post_norm: bool = True


@dataclass(frozen=True, slots=True)
class Simulation:
    """For benchmarks on random weights: accept `lengths` - 1 nodes whatever the target says.

    fixed_token: write this id for every emitted token; None keeps the draft's tokens.
    """

    lengths: Tensor  # [1] or [B] int64, on the device: a captured step reads it anew each time
    fixed_token: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step's rows stand, read once for all of its phases: single launches of such reads add up."""

    n: Tensor  # [B] int64, length of the prefix
    page_table: Tensor  # [B, P] int64
    positions: Tensor  # [B, M] int64, n .. n+M-1
    slots: Tensor  # [B, M] int64, of these positions: the tree's nodes', then the accepted path's

    @staticmethod
    def behind(state: RowState, batch: StepBatch, n: Tensor, count: int) -> Place:
        """The `count` positions behind prefixes of n [B] tokens of `batch`'s rows."""
        positions = n.unsqueeze(1) + torch.arange(count, device=n.device)
        page_table = state.page_table.index_select(0, batch.rows)
        return Place(n, page_table[:, : batch.pages], positions, state.slots(page_table, positions))

    def first(self, count: int) -> Place:
        """Of the same rows, the first `count` positions only."""
        return replace(self, positions=self.positions[:, :count], slots=self.slots[:, :count])


@dataclass(frozen=True, slots=True)
class Cycle:
    """What the parts of one decode step hand on; spec None is plain decoding, a tree of the root alone."""

    spec: SpecConfig | None
    place: Place
    sampling: SamplingBatch
    noise: Tensor  # [B, levels, V or 1]
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Emission(Accepted):
    """What a cycle accepts, and its tokens' log-probabilities where a row asks for them."""

    logprobs: Tensor | None = None  # [B, W, 1 + 20] int64, see `pack_logprobs`


def pack_logprobs(values: Tensor, ids: Tensor) -> Tensor:
    """One int64 for each pair: float32 values [...] in the low word, ids [...] in the high one."""
    return torch.stack((values.view(torch.int32), ids.int()), dim=-1).view(torch.int64).squeeze(-1)


def unpack_logprobs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """`pack_logprobs` undone: values float32 and ids int32, both [...]."""
    words = packed.contiguous().unsqueeze(-1).view(torch.int32)  # [..., 2]
    return words[..., 0].contiguous().view(torch.float32), words[..., 1]


def pack(emission: Emission) -> Tensor:
    """Lengths, tokens and log-probabilities in one tensor, so that one copy brings them to the host.

    [B, 1 + W] int64, or [B, 1 + W + 21 W] with log-probabilities.
    """
    parts = [emission.length.unsqueeze(1), emission.tokens]
    if emission.logprobs is not None:
        parts.append(emission.logprobs.flatten(1))
    return torch.cat(parts, dim=1)


def no_mark(_phase: str) -> None:
    """The default `mark`: nobody is timing."""


def spec_step(
    models: Models,
    state: RowState,
    batch: StepBatch,
    spec: SpecConfig,
    options: StepOptions,
    *,
    simulation: Simulation | None = None,
    mark: Mark = no_mark,
) -> Emission:
    """One speculative cycle for every row of `batch`; needs draft_len == n in each (see `catch_up`)."""
    cycle = draft_part(models, state, batch, spec, options)
    mark("draft")
    return _verify_and_accept(models, state, batch, cycle, options, simulation, mark)


def plain_step(
    models: Models,
    state: RowState,
    batch: StepBatch,
    options: StepOptions,
    *,
    simulation: Simulation | None = None,
    mark: Mark = no_mark,
) -> Emission:
    """One token for every row: a tree of the root alone. The draft falls behind; `catch_up` repairs that."""
    cycle = draft_part(models, state, batch, None, options)
    return _verify_and_accept(models, state, batch, cycle, options, simulation, mark)


def _verify_and_accept(
    models: Models,
    state: RowState,
    batch: StepBatch,
    cycle: Cycle,
    options: StepOptions,
    simulation: Simulation | None,
    mark: Mark,
) -> Emission:
    states, logits = verify(models, state, batch, cycle)
    mark("verify")
    return accept_part(models, state, batch, cycle, states, logits, options, simulation=simulation, mark=mark)


def draft_part(
    models: Models, state: RowState, batch: StepBatch, spec: SpecConfig | None, options: StepOptions
) -> Cycle:
    """The first part of a decode step: where the rows stand, their noise, and the tree to verify.

    The host may read `Cycle.tree` (tokens, parents, depth) meanwhile; this part changes no row and no page.
    """
    nodes, levels = (spec.draft_tokens, spec.num_steps + 1) if spec else (1, 1)
    place = Place.behind(state, batch, state.n[batch.rows], nodes)
    sampling = state.sampling_batch(batch)
    noise = position_noise(models, sampling, place.n + 1, levels, state.cache.dtype)
    if spec is None:
        tree = DraftTree.plain(state.root[batch.rows])
    else:
        tree = draft(models, state, batch, place, sampling, noise, spec, options)
    return Cycle(spec, place, sampling, noise, tree)


def accept_part(
    models: Models,
    state: RowState,
    batch: StepBatch,
    cycle: Cycle,
    states: States,
    logits: Tensor,
    options: StepOptions,
    *,
    grammar: Tensor | None = None,
    simulation: Simulation | None = None,
    mark: Mark = no_mark,
) -> Emission:
    """The last part: choose, accept and make it permanent.

    grammar: [B, D, ceil(V / 32)] int32 with `any_grammar`, which tokens may follow each node; all ones in
    rows without a grammar. What it holds for nodes that the grammar itself rules out does not matter, for
    none of them is on the accepted path.
    """
    assert batch.any_grammar == (grammar is not None), "a batch with grammars needs its nodes' masks"
    width = cycle.spec.width if cycle.spec else 1
    sampling = cycle.sampling if grammar is None else replace(cycle.sampling, grammar=grammar)
    emission = accept(sampling, cycle.tree, logits, cycle.noise, cycle.place.n, width, simulation)
    mark("accept")
    if cycle.spec is None:
        _remember(models, state, batch, cycle.place.n, emission, states, options)
        _advance(state, batch, emission)
    else:
        commit(models, state, batch, cycle.place, emission, states, options)
    mark("extend")
    return emission


def draft(
    models: Models,
    state: RowState,
    batch: StepBatch,
    place: Place,
    sampling: SamplingBatch,
    noise: Tensor,
    spec: SpecConfig,
    options: StepOptions,
) -> DraftTree:
    """Grow the tree level by level and keep its D-1 best nodes (EAGLE-2, arXiv 2406.16858).

    Level l holds tokens of index n+l; a beam node's pair (state of its parent, its token) has position
    n+l-1, attends the committed NextN prefix and exactly its ancestors in the step buffer.
    """
    assert models.nextn is not None, "speculation needs a NextN layer"
    nextn, k, n = models.nextn, spec.topk, place.n
    tail = state.tail[: batch.size, : max(k * (spec.num_steps - 1), 1)]

    # [B, 1, hidden], before shared_head.norm
    last = state.draft_state.index_select(0, batch.rows).unsqueeze(1)
    states = States(last, nextn.final_norm(last))
    path = no_path(sampling, batch.size)
    positions = _level_positions(sampling, n, 1, 1)
    tokens, values = _children(models, states, sampling, path, positions, noise[:, :1], k, options)
    growth = grow.start(tokens[:, 0], values[:, 0], spec)
    while growth.level < spec.num_steps:
        beam = growth.beam()
        inputs = DraftInput(
            tokens=beam.tokens,
            positions=(n + (beam.level - 1)).unsqueeze(1).expand(-1, k),
            mask=beam.mask,
            tail=tail,
            start=beam.start,
            prefix_lens=n,
            page_table=place.page_table,
        )
        recycled = take(draft_hidden(states, options), beam.parent_slot)
        states = nextn.decode(inputs, recycled, state.cache)  # [B, k, hidden]
        path = (beam.path_tokens, beam.path_valid) if sampling.any_penalty else None
        own_noise = noise[:, beam.level : beam.level + 1]
        positions = _level_positions(sampling, n, beam.level + 1, k)
        growth.extend(*_children(models, states, sampling, path, positions, own_noise, k, options))
    return growth.rerank(state.root[batch.rows])


def _children(
    models: Models,
    states: States,
    sampling: SamplingBatch,
    path: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
    noise: Tensor,
    k: int,
    options: StepOptions,
) -> tuple[Tensor, Tensor]:
    """The k best next tokens of each draft node and their values, both [B, M, k].

    states [B, M, hidden]; path: tokens and validity [B, M, L], for penalties; positions [B, M] chosen for,
    for bans; noise [B, 1, V or 1] of that position.
    """
    logits = models.target.logits(states.normed)
    own_noise = noise if options.coupled else None
    return best_children(logits, sampling, own_noise, k, options.tau, path, positions)


def _level_positions(sampling: SamplingBatch, n: Tensor, level: int, nodes: int) -> Tensor | None:
    """The position of a level's tokens, [B, nodes]; None where nobody asks."""
    return (n + level).unsqueeze(1).expand(-1, nodes) if sampling.any_bias else None


def verify(models: Models, state: RowState, batch: StepBatch, cycle: Cycle) -> tuple[States, Tensor]:
    """The second part, which needs no masks: states [B, D, hidden] and logits [B, D, V] of all nodes."""
    place, tree = cycle.place, cycle.tree
    inputs = TreeInput(
        tokens=tree.tokens,
        positions=place.n.unsqueeze(1) + tree.depth,
        mask=tree.mask,
        valid=batch.live.unsqueeze(1).expand_as(tree.tokens),
        slots=place.slots,
        prefix_lens=place.n,
        page_table=place.page_table,
    )
    states = models.target.decode(inputs, state.cache)
    return states, models.target.logits(states.normed)


def accept(
    sampling: SamplingBatch,
    tree: DraftTree,
    logits: Tensor,
    noise: Tensor,
    n: Tensor,
    width: int,
    simulation: Simulation | None,
) -> Emission:
    """Choose every node's next token with the noise of its position, then walk the tree along the choices.

    n [B]: the rows' lengths, behind which a node of depth d chooses the token of position n + 1 + d.
    """
    path = tree.path_tokens() if sampling.any_penalty else None
    positions = (n + 1).unsqueeze(1) + tree.depth if sampling.any_bias else None
    adjusted, after = adjust_logits(logits, sampling, path, positions)
    target_tokens = pick_tokens(adjusted, after, noise, tree.depth)
    if simulation is None:
        accepted = tree_accept.accept(tree, target_tokens, width)
    else:
        lengths = simulation.lengths.expand(tree.tokens.shape[0])
        accepted = tree_accept.simulated(tree, lengths, target_tokens, width)
        if simulation.fixed_token is not None:
            accepted = replace(accepted, tokens=torch.full_like(accepted.tokens, simulation.fixed_token))
    logprobs = _emitted_logprobs(sampling, logits, adjusted, accepted) if sampling.any_logprobs else None
    return Emission(accepted.path, accepted.length, accepted.tokens, logprobs)


def _emitted_logprobs(
    sampling: SamplingBatch, logits: Tensor, adjusted: Tensor, accepted: Accepted
) -> Tensor:
    """Packed log-probabilities [B, W, 1 + 20] of what the accepted nodes emit; of these nodes only."""
    index = accepted.path.unsqueeze(-1).expand(-1, -1, logits.shape[2])  # [B, W, V]
    own = logits.gather(1, index)
    own_adjusted = own if adjusted is logits else adjusted.gather(1, index)
    return pack_logprobs(*chosen_logprobs(own, own_adjusted, sampling, accepted.tokens))


def commit(
    models: Models,
    state: RowState,
    batch: StepBatch,
    place: Place,
    accepted: Accepted,
    states: States,
    options: StepOptions,
) -> None:
    """Make the accepted path permanent: the only place where speculation changes rows and caches.

    With a = accepted nodes below the root, before -> after, in slots of the row:

    | slots          | target cache                       | NextN cache                           |
    |----------------|------------------------------------|---------------------------------------|
    | 0 .. n-1       | prefix, untouched                  | prefix, untouched                     |
    | n .. n+a       | node order -> path order           | scratch -> pairs (h_i, t_{i+1}) of    |
    |                |                                    | the target's states and emitted tokens|
    | n+a+1 ..       | scratch                            | scratch                               |
    """
    valid = accepted.valid & batch.live.unsqueeze(1)
    chain = place.first(accepted.path.shape[1])
    compact(state.cache[:-1], place.slots.gather(1, accepted.path), chain.slots, valid)

    tokens, hidden = accepted.tokens.clamp(min=0), take(draft_hidden(states, options), accepted.path)
    output = extend_draft(models, state, chain, tokens, hidden, valid)
    state.draft_state[batch.rows] = take(output, accepted.length.unsqueeze(1) - 1).squeeze(1)
    state.draft_len[batch.rows] = place.n + accepted.length
    _advance(state, batch, accepted)


def catch_up(models: Models, state: RowState, batch: StepBatch) -> None:
    """Bring the NextN cache from draft_len to n out of the ring: by at most RING pairs a row.

    Every row runs RING pairs, so that no shape depends on data; those from n on are not valid. A row that is
    not behind, or not live, keeps all that it has.
    """
    rows, draft_len = batch.rows, state.draft_len[batch.rows]
    behind = (state.n[rows] - draft_len) * batch.live  # [B]
    place = Place.behind(state, batch, draft_len, RING)
    where = (rows.unsqueeze(1), place.positions % RING)
    tokens, states = state.ring_token[where], state.ring_hidden[where]
    valid = place.positions < (draft_len + behind).unsqueeze(1)
    output = extend_draft(models, state, place, tokens, states, valid)
    fresh = take(output, (behind - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    state.draft_state[rows] = torch.where(behind.unsqueeze(1) > 0, fresh, state.draft_state[rows])
    state.draft_len[rows] = draft_len + behind


def chain_input(state: RowState, place: Place, tokens: Tensor, valid: Tensor) -> TreeInput:
    """Tokens [B, M] one behind the other at `place`'s positions, each attending those before it."""
    return TreeInput(
        tokens=tokens,
        positions=place.positions,
        mask=state.chain_mask[: tokens.shape[1]].expand_as(tokens),
        valid=valid,
        slots=place.slots,
        prefix_lens=place.n,
        page_table=place.page_table,
    )


def extend_draft(
    models: Models,
    state: RowState,
    place: Place,
    tokens: Tensor,
    states: Tensor,
    valid: Tensor,
) -> Tensor:
    """NextN over the chain of pairs at `place`'s positions; writes the valid ones to its cache.

    tokens [B, M] int64 are t_{i+1}, states [B, M, hidden] the target's h_i, valid [B, M]. Returns the layer's
    output [B, M, hidden], before shared_head.norm.
    """
    assert models.nextn is not None
    inputs = chain_input(state, place, tokens, valid)
    return models.nextn.decode(inputs, states, state.cache).hidden


def position_noise(
    models: Models, sampling: SamplingBatch, first: Tensor, levels: int, dtype: torch.dtype
) -> Tensor:
    """Noise of the positions first .. first+levels-1; first [B] -> [B, levels, V or, all greedy, 1].

    Level l of the draft and the tree's nodes of depth l-1 choose for the same position with the same noise.
    """
    wide = accumulation_dtype(dtype)
    return level_noise(sampling, first, levels, models.cfg.vocab_size, wide)


def no_path(sampling: SamplingBatch, rows: int) -> tuple[Tensor, Tensor] | None:
    """The path of nodes right below the root, one a row: nothing is on it. None where nobody counts."""
    if not sampling.any_penalty:
        return None
    tokens = sampling.counts.new_zeros(rows, 1, 0, dtype=torch.int64)
    return tokens, tokens.bool()


def draft_hidden(states: States, options: StepOptions) -> Tensor:
    """The state that the next draft layer reads: the target's, or its own recycled one."""
    return states.normed if options.post_norm else states.hidden


def _remember(
    models: Models,
    state: RowState,
    batch: StepBatch,
    n: Tensor,
    accepted: Accepted,
    states: States,
    options: StepOptions,
) -> None:
    """Put the state and the token of a plain step into the ring, for a draft that is caught up later."""
    if models.nextn is None:
        return
    index = n % RING
    state.ring_hidden[batch.rows, index] = draft_hidden(states, options)[:, 0]
    state.ring_token[batch.rows, index] = accepted.tokens[:, 0].clamp(min=0)


def _advance(state: RowState, batch: StepBatch, accepted: Accepted) -> None:
    """Move the rows over the emitted tokens; the last one is the new root."""
    rows = batch.rows
    last = accepted.tokens.gather(1, (accepted.length - 1).unsqueeze(1)).squeeze(1)
    state.root[rows] = last.clamp(min=0)
    state.n[rows] += accepted.length * batch.live
    count_tokens(state, batch, accepted.tokens, accepted.valid)


def count_tokens(state: RowState, batch: StepBatch, tokens: Tensor, valid: Tensor) -> None:
    """Add emitted tokens [B, W] to the rows' penalty counts."""
    if batch.any_penalty:
        counts = state.sampling.counts
        where = batch.rows.unsqueeze(1) * counts.shape[1] + tokens.clamp(min=0)
        counts.view(-1).scatter_add_(0, where.flatten(), valid.to(torch.int32).flatten())


def take(states: Tensor, nodes: Tensor) -> Tensor:
    """The states of some nodes: [B, M, hidden] at nodes [B, K] -> [B, K, hidden]."""
    if states.shape[1] == 1:  # where there is one, all nodes are it
        return states.expand(-1, nodes.shape[1], -1)
    return states.gather(1, nodes.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
