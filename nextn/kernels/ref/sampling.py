"""Counter-based sampling: the processed distribution, Gumbel noise keyed by (seed, position), the choice.

The token at absolute position t is argmax over tokens of (processed log-probability + noise), and the
noise is a function of the request's seed, t and the token id alone. So the text depends neither on the
batch nor on the tree that was verified, and the draft can rank its children with the very same noise.
Random bits: Philox4x32-10 (Salmon et al., SC 2011). Legend: B rows, M nodes a row, V vocabulary,
L path tokens a node.

Every row's result is bit for bit the same whatever the other rows ask for: the host flags skip work, they
never change what a row without penalties, filters or temperature gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels.ref.dtypes import accumulation_dtype
from nextn.kernels.ref.tree_ops import log_values, top_children

WORD = 0xFFFFFFFF  # words of 32 bits, held in int64
ROUNDS = 10
# The Philox multipliers less 2^32, so that word * multiplier fits int64 (see `_multiply`).
MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
CPU_BLOCK = 32768  # words at a time: what one round writes stays in the cache (2 to 7 times as fast)

MAX_LOGPROBS = 20
"""Alternatives whose log-probabilities go beside each chosen token's."""

MAX_CHILDREN = 64
"""Children a node that the vocabulary kernel finds; more take plain torch."""

NO_TOKEN = -1
"""What `pick` returns for a node without any finite score, as NaN in the model leaves behind."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of a batch chooses its tokens.

    The flags are host booleans, true when at least one row needs that work. temperature 0 is greedy: no
    noise, no filters. top_k 0, top_p 1, min_p 0, frequency 0, presence 0, repetition 1 are off. What only
    `any_bias` or `any_logprobs` reads may be None without it.

    bias_ids, bias_values: what is added to single tokens. Unused entries add -0.0, which changes no bit, to
    any token. banned_ids: tokens that cannot be chosen for a position before `ban_until`; -1 where unused.
    grammar: bit v % 32 of word v / 32 says whether token v may follow node m; None where nobody asks.
    """

    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    frequency: Tensor  # [B] float32
    presence: Tensor  # [B] float32
    repetition: Tensor  # [B] float32
    seed: Tensor  # [B] int64, the 64 bits of the key
    choice: Tensor  # [B] int64, which of a request's n choices
    counts: Tensor  # [B, V] int32, committed output tokens, the root included
    prompt_seen: Tensor  # [B, V] bool
    any_sampled: bool
    any_filter: bool
    any_penalty: bool
    any_bias: bool = False
    any_logprobs: bool = False
    bias_ids: Tensor | None = None  # [B, 300] int64
    bias_values: Tensor | None = None  # [B, 300] float32
    banned_ids: Tensor | None = None  # [B, 32] int64
    ban_until: Tensor | None = None  # [B] int64, absolute position
    raw_logprobs: Tensor | None = None  # [B] bool, log-probabilities before all processing
    grammar: Tensor | None = None  # [B, M, ceil(V / 32)] int32

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and noise comes between the logits and the choice."""
        return self.any_filter or self.any_penalty or self.any_bias or self.grammar is not None

    def adjusted(self) -> SamplingBatch:
        """The batch for logits that `adjust_logits` has been over: temperature and noise are left."""
        return replace(self, any_filter=False, any_penalty=False, any_bias=False, grammar=None)


def process_logits(
    logits: Tensor,
    batch: SamplingBatch,
    path_tokens: Tensor,
    path_valid: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """The processed log-probabilities of every node, [B, M, V] float32 (float64 for float64 logits).

    logits [B, M, V]; path_tokens [B, M, L] int64 and path_valid [B, M, L] bool are the draft tokens from
    below the root down to the node itself, which penalties count beside `counts`; positions [B, M] int64 of
    the tokens to be chosen, needed with `any_bias`. NaN logits count as -inf and +inf as the largest float;
    a node with no finite logit gets -inf throughout.

    The order: what the grammar forbids and what is banned at the position goes to -inf; penalties; bias;
    temperature (rows with T = 0 stay as they are and skip the filters); min_p; top_k; top_p on what remains;
    renormalised, so that what is impossible is -inf. Penalties multiply a logit, so it matters that the bias
    is added after them: it moves the score that the penalties left by just what was asked. Drafting,
    verification, plain decoding and prefill all choose through this one function.
    """
    return normalise(adjust_logits(logits, batch, path_tokens, path_valid, positions), batch)


def normalise(x: Tensor, batch: SamplingBatch) -> Tensor:
    """Log-probabilities of what `adjust_logits` returns: tempered in rows with T > 0."""
    return _log_softmax(_temper(x, batch) if batch.any_sampled else x)


def adjust_logits(
    logits: Tensor,
    batch: SamplingBatch,
    path_tokens: Tensor,
    path_valid: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """`process_logits` before temperature: penalised and biased logits, -inf where a token is impossible."""
    x = logits.to(accumulation_dtype(logits.dtype))
    if batch.grammar is not None:
        x = x.masked_fill(~unpack_bits(batch.grammar, x.shape[-1]), -math.inf)
    if batch.any_penalty:
        x = _penalise(x, batch, path_tokens, path_valid)
    if batch.any_bias:
        x = _bias(x, batch, positions)
    x = _clean(x)
    if batch.any_sampled and batch.any_filter:
        x = x.masked_fill(~_filter(_temper(x, batch), batch), -math.inf)
    return x


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of words [..., n] int32, lowest bit first: [..., count] bool."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).flatten(-2)[..., :count].bool()


def token_logprobs(logp: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens` [...] and, behind them, of the MAX_LOGPROBS best: both [..., 1 + 20].

    logp [..., V] log-probabilities. Values float32 and ids int64, the best in descending order of the rounded
    value, ties to the lower id; id -1 and -inf where the vocabulary ends before.
    """
    single = logp.float()
    own = single.gather(-1, tokens.clamp(min=0).unsqueeze(-1))
    best, _ = top_children(single, single, min(MAX_LOGPROBS, single.shape[-1]))
    return pad_logprobs(tokens, own, best, single.gather(-1, best))


def pad_logprobs(tokens: Tensor, own: Tensor, best: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` returns: tokens [...] with values own [..., 1], best [..., n] with `values`."""
    missing = (0, MAX_LOGPROBS - best.shape[-1])
    return (
        torch.cat((own, F.pad(values, missing, value=-math.inf)), dim=-1),
        torch.cat((tokens.unsqueeze(-1), F.pad(best, missing, value=NO_TOKEN)), dim=-1),
    )


def asked_logprobs(logits: Tensor, adjusted: Tensor, batch: SamplingBatch) -> Tensor:
    """Log-probabilities of nodes [B, M, V] float32, as each row asks for them.

    Of the processed distribution, or of the model's own in rows with `raw_logprobs`. adjusted: what
    `adjust_logits` makes of `logits` [B, M, V].
    """
    assert batch.raw_logprobs is not None, "log-probabilities need to know which rows want raw ones"
    raw = _per_row(batch.raw_logprobs)
    return torch.where(raw, raw_logprobs(logits), normalise(_clean(adjusted), batch)).float()


def chosen_logprobs(
    logits: Tensor, adjusted: Tensor, batch: SamplingBatch, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of `tokens` [B, M] that nodes with `logits` [B, M, V] chose, see `asked_logprobs`."""
    return token_logprobs(asked_logprobs(logits, adjusted, batch), tokens)


def raw_logprobs(logits: Tensor) -> Tensor:
    """The model's own log-probabilities of logits [..., V], float32 or float64."""
    return _log_softmax(_clean(logits))


def _clean(logits: Tensor) -> Tensor:
    """Logits in float32 or float64, NaN as -inf and +inf as the largest float."""
    wide = logits.to(accumulation_dtype(logits.dtype))
    return torch.nan_to_num(wide, nan=-math.inf, neginf=-math.inf)


def _log_softmax(x: Tensor) -> Tensor:
    """Of `_clean` logits; -inf throughout where none is finite."""
    return torch.nan_to_num(x.log_softmax(-1), nan=-math.inf, neginf=-math.inf)


def perturb(logp: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
    """Scores whose argmax samples from `logp`: noise is added in rows with T > 0.

    logp [B, M, V]; positions [B, M] int64, the absolute position of the token to be chosen, or [B, 1]
    where all nodes of a row stand at the same one (the noise is then made once a row).
    """
    if not batch.any_sampled:
        return logp
    return logp + _row_noise(batch, positions, logp.shape[-1], logp.dtype)


def level_noise(batch: SamplingBatch, first: Tensor, levels: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Noise of `levels` consecutive positions from `first` [B] int64 on, [B, levels, V]; 0 where T = 0.

    One call serves a whole cycle: level l of the draft and every tree node of depth l-1 choose a token
    for the same position. Without sampled rows the result is [B, levels, 1] of zeros.
    """
    if not batch.any_sampled:
        return torch.zeros(first.shape[0], levels, 1, dtype=dtype, device=first.device)
    positions = first.unsqueeze(1) + torch.arange(levels, device=first.device)
    return _row_noise(batch, positions, vocab, dtype)


def add_noise(logp: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """What `perturb` gives, from noise made once: node m of a row gets noise[row, level[row, m]].

    logp [B, M, V], noise [B, levels, V or 1] from `level_noise`, level [B, M] int64 (a tree's depth).
    """
    rows = torch.arange(level.shape[0], device=level.device).unsqueeze(1)
    return logp + noise[rows, level]


def pick(scores: Tensor) -> Tensor:
    """The best token of each node: scores [B, M, V] without NaN -> [B, M] int64, ties to the lower id.

    `NO_TOKEN` where no score is finite: the model computed nothing to choose from.
    """
    best = scores.max(-1)
    return torch.where(best.values > -math.inf, best.indices, NO_TOKEN)


def child_values(scores: Tensor, logp: Tensor, batch: SamplingBatch, tau: float = 1.0) -> Tensor:
    """What a draft child adds to its path's value, [B, M, V], 0 or below.

    Rows with T > 0: log_softmax(scores / tau), the chance that the target picks the child given the
    shared noise, where tau stands for how far the target's log-probabilities differ from the draft's.
    Rows with T = 0: logp. `scores` are `logp` perturbed, both [B, M, V].
    """
    if not batch.any_sampled:
        return logp
    coupled = (scores / tau).log_softmax(-1)
    return torch.where(_per_row(batch.temperature) > 0, coupled, logp)


def best_children(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor | None,
    k: int,
    tau: float = 1.0,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best next tokens of each draft node and their values: tokens [B, M, k] int64, values [B, M, k].

    logits [B, M, V]; noise [B, 1, V or 1] of the position that they are chosen for, None ranks by the
    distribution alone; path: what `process_logits` counts below the root, needed with penalties; positions
    [B, M]: of the children, needed with biases and bans. Values are log-probabilities (see `child_values`),
    -inf where the model computed nothing.
    """
    logp = process_logits(logits, batch, *path_or_empty(logits, batch, path), positions)
    scores = logp if noise is None else logp + noise
    values = logp if noise is None else child_values(scores, logp, batch, tau)
    tokens, chosen = top_children(scores, values, k)
    return tokens, log_values(chosen)


def pick_tokens(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor,
    level: Tensor,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The token of each node [B, M] int64, `NO_TOKEN` where it has no finite logit; ties to the lower id.

    logits [B, M, V]; noise [B, levels, V or 1] from `level_noise`, of which node m takes noise[row,
    level[row, m]]; level [B, M] int64 (a tree's depth); path and positions as in `best_children`.
    """
    logp = process_logits(logits, batch, *path_or_empty(logits, batch, path), positions)
    return pick(add_noise(logp, noise, level))


def gumbel_noise(seed: Tensor, position: Tensor, choice: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise, [N, vocab], a function of its own row's (seed, position, choice) and the id.

    seed, position, choice [N] int64. With x the first word of Philox at counter (id, position, choice, 0)
    and the seed as the key, low word first: u = min((x + 0.5) 2^-32, 1 - 2^-24), g = -log(-log1p(-u)).
    u is exact and the logarithms are taken in float64, then rounded to `dtype`, so that devices agree
    up to the rounding of float64 logarithms.
    """
    t, c = (position & WORD).unsqueeze(1), (choice & WORD).unsqueeze(1)  # [N, 1]
    key = ((seed & WORD).unsqueeze(1), ((seed >> 32) & WORD).unsqueeze(1))
    noise = torch.empty(seed.shape[0], vocab, dtype=dtype, device=seed.device)
    block = max(CPU_BLOCK // max(seed.shape[0], 1), 4096) if seed.device.type == "cpu" else vocab
    for first in range(0, vocab, block):
        token = torch.arange(first, min(first + block, vocab), device=seed.device).unsqueeze(0)
        x = philox((token, t, c, torch.zeros_like(t)), key)[0]  # [N, block]
        u = ((x.to(torch.float64) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
        noise[:, first : first + block] = u.neg_().log1p_().neg_().log_().neg_()
    return noise


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words out for four counter words and two key words, all int64 below 2^32.

    The words broadcast against each other, so a word that is the same along a dimension costs nothing.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of word * (multiplier + 2^32), for a multiplier in (-2^31, 0).

    word * multiplier fits int64; the missing word * 2^32 adds `word` to the high half alone.
    """
    product = word * multiplier
    return (product >> 32) + word, product & WORD


def path_or_empty(
    logits: Tensor, batch: SamplingBatch, path: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """`path`, or an empty one where nobody counts it."""
    if path is not None:
        return path
    assert not batch.any_penalty, "penalties count each node's path"
    nothing = logits.new_zeros(*logits.shape[:2], 0, dtype=torch.int64)
    return nothing, nothing.bool()


def _per_row(parameter: Tensor) -> Tensor:
    """[B] -> [B, 1, 1], to broadcast over nodes and tokens."""
    return parameter[:, None, None]


def _row_noise(batch: SamplingBatch, positions: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Noise at each row's own positions [B, n] in rows with T > 0, zero elsewhere: [B, n, V]."""
    rows, count = positions.shape
    seed = batch.seed.unsqueeze(1).expand(rows, count)
    choice = batch.choice.unsqueeze(1).expand(rows, count)
    noise = gumbel_noise(seed.flatten(), positions.flatten(), choice.flatten(), vocab, dtype)
    return torch.where(_per_row(batch.temperature) > 0, noise.view(rows, count, vocab), 0.0)


def _penalise(x: Tensor, batch: SamplingBatch, path_tokens: Tensor, path_valid: Tensor) -> Tensor:
    """Repetition (prompt, output and own path), then frequency and presence (output and own path).

    Repetition divides positive logits and multiplies negative ones, as in Hugging Face transformers.
    """
    counts = batch.counts.unsqueeze(1).expand(x.shape).clone()  # [B, M, V] int32
    counts.scatter_add_(2, torch.where(path_valid, path_tokens, 0), path_valid.to(counts.dtype))
    written = counts > 0
    seen = written | batch.prompt_seen.unsqueeze(1)
    repetition = _per_row(batch.repetition).to(x.dtype)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - _per_row(batch.frequency).to(x.dtype) * counts
    return x - _per_row(batch.presence).to(x.dtype) * written


def _bias(x: Tensor, batch: SamplingBatch, positions: Tensor | None) -> Tensor:
    """Add each row's biases, and -inf to its banned tokens at positions before `ban_until`.

    One scatter does both. Ids are distinct but for entries that add -0.0, so the order of sums is no matter.
    """
    assert positions is not None, "bans depend on the position"
    assert batch.bias_ids is not None
    assert batch.bias_values is not None
    assert batch.banned_ids is not None
    assert batch.ban_until is not None
    shape = (-1, x.shape[1], -1)
    early = (positions < batch.ban_until.unsqueeze(1)).unsqueeze(-1)  # [B, M, 1]
    banned = batch.banned_ids.unsqueeze(1)
    ban = torch.where(early & (banned >= 0), -math.inf, -0.0).to(x.dtype)  # [B, M, 32]
    ids = torch.cat((batch.bias_ids.unsqueeze(1), banned.clamp(min=0)), dim=-1).expand(shape)
    values = torch.cat((batch.bias_values.to(x.dtype).unsqueeze(1).expand(shape), ban), dim=-1)
    return x.scatter_add(2, ids, values)


def _temper(x: Tensor, batch: SamplingBatch) -> Tensor:
    """Divide by T in rows with T > 0, relative to the node's maximum: a small T cannot overflow."""
    temperature = _per_row(batch.temperature).to(x.dtype)
    sampled = temperature > 0
    top = x.amax(-1, keepdim=True)
    shift = torch.where(sampled & (top > -math.inf), top, 0.0)
    return (x - shift) / torch.where(sampled, temperature, 1.0)


def _filter(x: Tensor, batch: SamplingBatch) -> Tensor:
    """Which tokens min_p, top_k and top_p keep, [B, M, V] bool, for tempered logits without NaN.

    In descending order each filter keeps a front, so one stable sort serves all three. The mass of top_p
    is summed in float64: what a float32 sum over a vocabulary loses could move the cut. It is not divided by
    its total, lest equal tokens' shares add up to less than they are.
    """
    sampled = batch.temperature > 0
    top_k = _per_row(torch.where(sampled & (batch.top_k > 0), batch.top_k, x.shape[-1]))
    min_p = _per_row(torch.where(sampled, batch.min_p, 0.0)).double()
    top_p = _per_row(torch.where(sampled, batch.top_p, 1.0)).double()
    ordered, index = torch.sort(x, dim=-1, descending=True, stable=True)
    # Under a tiny T a finite logit may be -inf here: as impossible as any.
    keep = (ordered >= ordered[..., :1] + min_p.log().to(x.dtype)) & (ordered > -math.inf)
    keep &= torch.arange(x.shape[-1], device=x.device) < top_k
    mass = (ordered - ordered[..., :1]).double().exp().masked_fill(~keep, 0.0)
    until = mass.cumsum(-1)
    before = F.pad(until[..., :-1], (1, 0))  # [B, M, V] mass of the tokens ahead
    keep &= (before < top_p * until[..., -1:]) | (top_p >= 1.0)
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(-1, index, keep)
