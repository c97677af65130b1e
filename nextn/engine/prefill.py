"""The prefill steps: `prefill_step` for prompts of any length, `chain_step` for a few short ones.

The first lays chunks end to end and launches what it needs op by op, which a long chunk hides. A short one
would wait for the host, so it runs as *chains*: CHAIN consecutive tokens are one row of a decode forward, in
a recorded graph. The chains of one prompt run side by side: in each layer all of them write their latents
before any attends, so a chain reads those before it from the pages, as its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nextn.config import MAX_TREE_NODES
from nextn.engine.scheduler import Chunk
from nextn.engine.state import RowState, StepBatch
from nextn.engine.step import (
    Emission,
    Place,
    StepOptions,
    chain_input,
    count_tokens,
    draft_hidden,
    extend_draft,
    no_path,
    pack,
    pack_logprobs,
    position_noise,
    take,
)
from nextn.kernels.ops import adjust_logits, chosen_logprobs, pick_tokens
from nextn.kernels.ref.sampling import SamplingBatch, raw_logprobs, token_logprobs
from nextn.models.inputs import PrefillInput
from nextn.models.weights import Models

LOGIT_SLICE = 128
"""Prompt positions whose logits are held at once; each has a vocabulary of them."""

CHAIN = MAX_TREE_NODES
"""Tokens a chain: a row's masks have so many bits."""

MAX_CHAINS = 16
"""Chains of one step: up to 1,024 tokens. Of more, the device takes longer than the host needs to launch."""

MAX_CHAIN_WORK = 1 << 23
"""Pairs of a token and an entry of its prefix in one step of chains, whose attention reads latents and so
takes several times the arithmetic: about 45 ms on an H200 for DeepSeek-V3's layers with 16 heads."""

HEADER = 5
"""Numbers of a chain before its tokens: row, start, length, whether it is its row's last one here, and
whether its last token ends the prompt, so that the next one is chosen."""

CHAIN_FLAGS = {"any_sampled": True, "any_filter": True, "any_penalty": True, "any_bias": True}
"""Chains are recorded with all options at once: beside their forward pass these cost nothing."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One prefill step as the host planned it; R requests, F of them end their prefill here.

    next_tokens: [T] token t_{i+1} of each position; undefined where `last` points, which is sampled here.
    last: [F] offsets into T. last_rows: StepBatch of the F rows. rows: [R]. lengths: [R] n after the step.
    scored: [P] offsets into T of the positions whose next prompt token's log-probability is asked for; None
    where nobody asks. grammar: [F, 1, ceil(V / 32)] int32, with `any_grammar`: the first tokens allowed.
    """

    inputs: PrefillInput
    next_tokens: Tensor
    rows: Tensor
    lengths: Tensor
    ends: Tensor  # [R] offset into T of each request's last token here
    last: Tensor
    last_rows: StepBatch
    scored: Tensor | None = None
    grammar: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill step brings: the F first tokens, and log-probabilities where they are asked for."""

    result: Tensor  # [F, 1 + 1] int64, or with log-probabilities [F, 1 + 1 + 21], see `pack`
    prompt_logprobs: Tensor | None  # [P, 1 + 20] int64, see `pack_logprobs`


def prefill_step(models: Models, state: RowState, plan: PrefillWork, options: StepOptions) -> Prefilled:
    """Prefill chunks of R requests; brings the first token of the F that end here.

    The NextN cache is extended over the same tokens: at a chunk's edge it reads the real next prompt token,
    at the prompt's end the token that was just sampled. Nothing is read back to the host, so a decode step of
    the rows that end here may be launched behind it at once.
    """
    batch = plan.last_rows
    assert batch.any_grammar == (plan.grammar is not None), "a batch with grammars needs its masks"
    states = models.target.prefill(plan.inputs, state.cache)  # [T, hidden]
    sampling = replace(state.sampling_batch(batch), grammar=plan.grammar)
    logits = models.target.logits(states.normed[plan.last]).unsqueeze(1)  # [F, 1, V]
    first = plan.inputs.positions[plan.last] + 1
    tokens, adjusted = _choose_first(models, state, sampling, logits, first)
    logprobs = None
    if sampling.any_logprobs:
        logprobs = pack_logprobs(*chosen_logprobs(logits, adjusted, sampling, tokens))
    emission = _of_roots(tokens, logprobs)
    roots = tokens.squeeze(1).clamp(min=0)

    if models.nextn is not None:
        next_tokens = plan.next_tokens.index_copy(0, plan.last, roots)
        inputs = replace(plan.inputs, tokens=next_tokens)
        output = models.nextn.prefill(inputs, draft_hidden(states, options), state.cache)
        state.draft_state[plan.rows] = output.hidden[plan.ends]
        state.draft_len[plan.rows] = plan.lengths
    state.n[plan.rows] = plan.lengths
    state.root[batch.rows] = roots
    count_tokens(state, batch, emission.tokens, emission.valid)
    return Prefilled(pack(emission), _prompt_logprobs(models, states.normed, plan))


def _choose_first(
    models: Models, state: RowState, sampling: SamplingBatch, logits: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens [B, 1] of positions `first` [B] from logits [B, 1, V], and the logits adjusted."""
    noise = position_noise(models, sampling, first, 1, state.cache.dtype)
    path, positions = no_path(sampling, first.shape[0]), first.unsqueeze(1)
    adjusted, after = adjust_logits(logits, sampling, path, positions)
    return pick_tokens(adjusted, after, noise, torch.zeros_like(positions)), adjusted


def _of_roots(tokens: Tensor, logprobs: Tensor | None = None) -> Emission:
    """What a plain step would emit for these tokens [B, 1]."""
    return Emission(torch.zeros_like(tokens), torch.ones_like(tokens).squeeze(1), tokens, logprobs)


def _prompt_logprobs(models: Models, normed: Tensor, plan: PrefillWork) -> Tensor | None:
    """Packed log-probabilities [P, 1 + 20] of the prompt tokens behind the `scored` positions, raw.

    normed [T, hidden]. A slice of positions at a time: logits of a whole prompt would fill the memory.
    """
    if plan.scored is None:
        return None
    parts = []
    for places in plan.scored.split(LOGIT_SLICE):
        logp = raw_logprobs(models.target.logits(normed[places]))
        parts.append(pack_logprobs(*token_logprobs(logp, plan.next_tokens[places])))
    return torch.cat(parts)


def fit_chains(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether chunks (start, length) are little enough work for chains."""
    counts = [(start, -(-length // CHAIN)) for start, length in spans]
    work = sum(count * CHAIN * start for start, count in counts)
    return sum(count for _, count in counts) <= MAX_CHAINS and work <= MAX_CHAIN_WORK


def chains_of(chunks: Sequence[Chunk]) -> list[list[int]] | None:
    """The chunks as chains of HEADER + 2 CHAIN numbers, those that end a prompt first.

    Behind the header: the tokens, and for each the one after it, 0 where that is chosen in the step. None if
    the chunks are too much work for chains.
    """
    if not fit_chains((chunk.start, chunk.length) for chunk in chunks):
        return None
    ending: list[list[int]] = []
    others: list[list[int]] = []
    for chunk in chunks:
        tokens, stop = chunk.entry.tokens, chunk.start + chunk.length
        for start in range(chunk.start, stop, CHAIN):
            end = min(start + CHAIN, stop)
            closes = end == stop
            samples = closes and chunk.is_last
            own, following = tokens[start:end], tokens[start + 1 : end + 1]
            numbers = [chunk.entry.row, start, end - start, closes, samples]
            numbers += own + [0] * (CHAIN - len(own)) + following + [0] * (CHAIN - len(following))
            (ending if samples else others).append(numbers)
    return ending + others


def chain_step(models: Models, state: RowState, chains: Tensor, options: StepOptions) -> Tensor:
    """Prefill chains [B, HEADER + 2 CHAIN] int64; returns `pack`ed emissions, of those that end a prompt.

    A chain of length 0 is padding, and its row the scratch row. Does what `prefill_step` does for the same
    tokens, but neither log-probabilities nor grammars. Reads nothing back to the host.
    """
    # Kernels read each of these on its own, so none stays strided.
    rows, start, length, closes, samples = chains[:, :HEADER].t().contiguous().unbind(0)
    tokens, following = (part.contiguous() for part in chains[:, HEADER:].split(CHAIN, dim=1))
    closes, samples = closes.bool(), samples.bool()
    batch = StepBatch(rows, length > 0, state.page_table.shape[1], **CHAIN_FLAGS)
    place = Place.behind(state, batch, start, CHAIN)
    order = torch.arange(CHAIN, device=rows.device)
    valid = order < length.unsqueeze(1)
    end = (length - 1).clamp(min=0).unsqueeze(1)  # [B, 1], the last token
    inputs = chain_input(state, place, tokens, valid)
    states = models.target.decode(inputs, state.cache)  # [B, CHAIN, hidden]
    sampling, first = state.sampling_batch(batch), start + length
    logits = models.target.logits(take(states.normed, end))  # [B, 1, V]
    chosen, _ = _choose_first(models, state, sampling, logits, first)
    roots = chosen.clamp(min=0)  # [B, 1]

    # What the others write goes to the scratch row, whose length stays 0: it pads decode steps.
    closing, reached = torch.where(closes, rows, state.scratch_row), torch.where(closes, first, 0)
    if models.nextn is not None:
        following = torch.where((order == end) & samples.unsqueeze(1), roots, following)
        output = extend_draft(models, state, place, following, draft_hidden(states, options), valid)
        state.draft_state[closing] = take(output, end).squeeze(1)
        state.draft_len[closing] = reached
    state.n[closing] = reached
    state.root[torch.where(samples, rows, state.scratch_row)] = roots.squeeze(1)
    count_tokens(state, batch, chosen, samples.unsqueeze(1))
    return pack(_of_roots(chosen))
