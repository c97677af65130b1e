"""Sampling: the bits are Philox's, the distribution is the stated one, and no row depends on another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nextn.kernels.ref import sampling
from nextn.kernels.ref.sampling import NO_TOKEN, SamplingBatch, gumbel_noise, perturb, pick, process_logits
from tests.compare import assert_close
from tests.strategies import Knobs, SamplingCase, sampling_batch, sampling_cases

WORD = 0xFFFFFFFF


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def plain_noise(seed: int, position: int, choice: int, token: int) -> float:
    """One number of Gumbel noise."""
    word = plain_philox([token, position & WORD, choice & WORD, 0], [seed & WORD, seed >> 32 & WORD])[0]
    return -math.log(-math.log1p(-min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (WORD, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(word: int, expected: tuple[int, ...]) -> None:
    """The published answers for a zero and for an all-ones key and counter."""
    w = torch.tensor([word])
    assert tuple(int(x) for x in sampling.philox((w, w, w, w), (w, w))) == expected


def test_noise_is_philox_of_token_position_choice() -> None:
    """Each number is that of unbounded integers and the math module, for any seed, position and choice."""
    rows = [(0, 0, 0), (1, 2, 3), (-1, 163839, 0), (2**63 - 1, 7, 1), (-(2**63), 2**31, 2), (1 << 32, 7, 1)]
    seed, position, choice = (torch.tensor(column) for column in zip(*rows, strict=True))
    noise = gumbel_noise(seed, position, choice, 9, torch.float64)
    expected = torch.tensor(
        [[plain_noise(*row, token) for token in range(9)] for row in rows], dtype=torch.float64
    )
    assert_close(noise, expected, "fp64", what="noise")
    assert torch.equal(gumbel_noise(seed, position, choice, 9, torch.float32), noise.float())


def test_long_vocabulary_has_no_seams() -> None:
    """Noise is made in blocks of the vocabulary; ids on both sides of an edge have their own numbers."""
    vocab, row = 2 * sampling.CPU_BLOCK + 3, torch.tensor([11])
    noise = gumbel_noise(row, row, row, vocab, torch.float64)[0]
    ids = [0, sampling.CPU_BLOCK - 1, sampling.CPU_BLOCK, 2 * sampling.CPU_BLOCK, vocab - 1]
    expected = torch.tensor([plain_noise(11, 11, 11, token) for token in ids], dtype=torch.float64)
    assert_close(noise[ids], expected, "fp64")


def test_noise_has_the_gumbel_law() -> None:
    """Mean, variance and quantiles of many numbers are those of the standard Gumbel law."""
    n = 4096
    rows = torch.arange(25)
    noise = gumbel_noise(rows, rows, torch.zeros_like(rows), n, torch.float64).flatten()
    error = math.sqrt(math.pi**2 / 6 / noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < 4 * error
    assert abs(noise.var().item() / (math.pi**2 / 6) - 1) < 0.02
    for q in (0.01, 0.25, 0.5, 0.9, 0.999):
        below = (noise < -math.log(-math.log(q))).double().mean().item()
        assert abs(below - q) < 4 * math.sqrt(q * (1 - q) / noise.numel())


def test_noise_does_not_depend_on_the_batch() -> None:
    """The same (seed, position, choice, token) gives the same bits in any batch, order and vocabulary."""
    seed, position, choice = torch.tensor([5, -9, 5]), torch.tensor([3, 3, 4]), torch.tensor([0, 1, 0])
    whole = gumbel_noise(seed, position, choice, 50, torch.float32)
    order = torch.tensor([2, 0])
    part = gumbel_noise(seed[order], position[order], choice[order], 20, torch.float32)
    assert torch.equal(part, whole[order, :20])
    assert len({tuple(row.tolist()) for row in whole}) == 3


def reference_row(
    logits: list[float], knobs: Knobs, counts: list[int], seen: list[bool], position: int, word: int = -1
) -> list[float]:
    """Processed log-probabilities of one node in plain Python; `counts` include the node's path."""
    f32 = {name: float32(getattr(knobs, name)) for name in FLOATS}
    x = [-math.inf if math.isnan(logit) or not word >> v & 1 else logit for v, logit in enumerate(logits)]
    for token in knobs.banned:
        if position < knobs.ban_until:
            x[token] = -math.inf
    for v, count in enumerate(counts):
        if count or seen[v]:
            x[v] = x[v] / f32["repetition"] if x[v] > 0 else x[v] * f32["repetition"]
        x[v] -= f32["frequency"] * count + f32["presence"] * (count > 0)
    for token, bias in knobs.bias:
        x[token] += float32(bias)
    if max(x) == -math.inf:
        return x
    if knobs.temperature == 0:
        return normalise(x)
    x = [logit / f32["temperature"] for logit in x]
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    best = x[order[0]]
    kept = [v for v in order if knobs.min_p == 0 or x[v] - best >= math.log(f32["min_p"]) - 1e-12]
    if knobs.top_k:
        kept = kept[: knobs.top_k]
    if knobs.top_p < 1:
        total = sum(math.exp(x[v] - best) for v in kept)
        mass, front = 0.0, []
        for v in kept:
            front.append(v)
            mass += math.exp(x[v] - best) / total
            if mass >= f32["top_p"]:
                break
        kept = front
    return normalise([x[v] if v in kept else -math.inf for v in range(len(x))])


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


FLOATS = ("temperature", "top_p", "min_p", "frequency", "presence", "repetition")


def normalise(x: list[float]) -> list[float]:
    best = max(x)
    total = math.log(sum(math.exp(value - best) for value in x))
    return [value - best - total for value in x]


@settings(max_examples=300)
@given(sampling_cases())
def test_process_logits_equals_the_slow_reference(case: SamplingCase) -> None:
    """Every node's distribution is the per-row reference's, support included, for any mixture of rows."""
    got = process_logits(case.logits, case.batch, case.path_tokens, case.path_valid, case.positions)
    for b, knobs in enumerate(case.rows):
        for m in range(case.logits.shape[1]):
            counts = case.counts[b].tolist()
            for token in case.path_tokens[b, m][case.path_valid[b, m]].tolist():
                counts[token] += 1
            expected = reference_row(
                case.logits[b, m].tolist(),
                knobs,
                counts,
                case.prompt_seen[b].tolist(),
                int(case.positions[b, m]),
                -1 if case.grammar is None else int(case.grammar[b, m, 0]),
            )
            assert_close(got[b, m], torch.tensor(expected, dtype=torch.float64), "fp64", what=f"{b}, {m}")


@given(sampling_cases())
def test_float32_agrees_with_float64(case: SamplingCase) -> None:
    """In float32 the same tokens stay and their log-probabilities are the same to rounding."""
    args = case.batch, case.path_tokens, case.path_valid, case.positions
    single = process_logits(case.logits.float(), *args)
    assert single.dtype == torch.float32
    assert_close(single, process_logits(case.logits, *args).float(), "fp32-logits")


@given(sampling_cases())
def test_a_row_does_not_depend_on_the_batch(case: SamplingCase) -> None:
    """A row alone, with only the flags that it needs, is bit for bit the row in its batch; scores too."""
    vocab, nodes = case.logits.shape[-1], case.logits.shape[1]
    logits = case.logits.float()
    positions = torch.arange(nodes).expand(len(case.rows), -1)
    whole = process_logits(logits, case.batch, case.path_tokens, case.path_valid, case.positions)
    scores = perturb(whole, case.batch, positions)
    for b, knobs in enumerate(case.rows):
        one = slice(b, b + 1)
        batch = sampling_batch([knobs], vocab, case.counts[one], case.prompt_seen[one])
        if case.grammar is not None and (case.grammar[b] != -1).any():
            batch = replace(batch, grammar=case.grammar[one])
        path, own = (case.path_tokens[one], case.path_valid[one]), case.positions[one]
        alone = process_logits(logits[one], batch, *path, own)
        assert_close(alone, whole[one], "bitwise")
        assert_close(perturb(alone, batch, positions[one]), scores[one], "bitwise")


@pytest.mark.parametrize("vocab", [4096, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_node_or_row_does_not_depend_on_the_number_around_it(vocab: int, dtype: torch.dtype) -> None:
    """Over a long vocabulary too, one node, or one row, alone is bit for bit one of many."""
    logits = (torch.randn(3, 4, vocab) * 3).to(dtype)
    path = torch.randint(0, vocab, (3, 4, 2))
    valid = torch.ones_like(path, dtype=torch.bool)
    rows = [Knobs(0.7, top_p=0.9, frequency=0.5), Knobs(1.0), Knobs(0.0)]
    batch = sampling_batch(rows, vocab)
    whole = process_logits(logits, batch, path, valid)
    for m in range(4):
        part = slice(m, m + 1)
        assert_close(
            process_logits(logits[:, part], batch, path[:, part], valid[:, part]), whole[:, part], "bitwise"
        )
    for b, knobs in enumerate(rows):
        one = slice(b, b + 1)
        alone = process_logits(logits[one], sampling_batch([knobs], vocab), path[one], valid[one])
        assert_close(alone, whole[one], "bitwise", what=f"row {b}")


@given(sampling_cases())
def test_path_counts_as_if_it_were_committed(case: SamplingCase) -> None:
    """Penalties along a node's ancestors are bit for bit those of plain decoding after the same tokens."""
    whole = process_logits(case.logits, case.batch, case.path_tokens, case.path_valid, case.positions)
    for m in range(case.logits.shape[1]):
        counts = case.counts.clone()
        for b in range(len(case.rows)):
            for token in case.path_tokens[b, m][case.path_valid[b, m]].tolist():
                counts[b, token] += 1
        nothing, one = case.path_tokens[:, :1, :0], slice(m, m + 1)
        grammar = None if case.grammar is None else case.grammar[:, one]
        batch = replace(case.batch, counts=counts, grammar=grammar)
        plain = process_logits(case.logits[:, one], batch, nothing, nothing.bool(), case.positions[:, one])
        assert_close(plain, whole[:, m : m + 1], "bitwise")


def one_node(
    logits: list[float], knobs: Knobs, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, SamplingBatch]:
    """The processed log-probabilities [V] of a single node, and its batch."""
    batch = sampling_batch([knobs], len(logits))
    nothing = torch.zeros(1, 1, 0, dtype=torch.int64)
    logp = process_logits(torch.tensor([[logits]], dtype=dtype), batch, nothing, nothing.bool())
    return logp[0, 0], batch


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        (Knobs(top_k=2), [1, 2]),
        (Knobs(top_p=1e-9), [1]),
        (Knobs(top_p=0.75), [1, 2, 3]),
        (Knobs(min_p=1.0), [1, 2, 3]),
        (Knobs(top_k=3, top_p=0.5), [1, 2]),
        (Knobs(temperature=0.0, top_k=1), [0, 1, 2, 3]),
    ],
)
def test_ties_at_a_cut_keep_the_lower_id(knobs: Knobs, kept: list[int]) -> None:
    """Among equal tokens a filter keeps the lower ids, at least one, and greedy rows skip all filters."""
    logp, _ = one_node([0.0, 2.0, 2.0, 2.0], knobs)
    assert torch.isfinite(logp).nonzero()[:, 0].tolist() == kept
    assert logp.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """A mass of exactly p is enough, and one bit more of p needs one token more."""
    above = torch.nextafter(torch.tensor(0.75), torch.tensor(1.0)).item()
    assert one_node([0.0] * 4, Knobs(top_p=0.75))[0].isfinite().tolist() == [True, True, True, False]
    assert one_node([0.0] * 4, Knobs(top_p=above))[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-3, 1.0, 100.0])
def test_strange_logits(temperature: float, dtype: torch.dtype) -> None:
    """No logits and no temperature give NaN: -inf never wins, +inf does, nothing finite is no token."""
    largest = torch.finfo(dtype).max
    for logits, best in (
        ([math.nan, 3.0, -math.inf], 1),
        ([1.0, math.inf, math.nan], 1),
        ([largest, -largest, 0.0], 0),
        ([-math.inf, math.nan, -math.inf], NO_TOKEN),  # nothing to choose from
    ):
        logp, batch = one_node(logits, Knobs(temperature=temperature, top_p=0.9, min_p=0.01), dtype)
        scores = perturb(logp[None, None], batch, torch.tensor([[7]]))
        assert not logp.isnan().any()
        assert not scores.isnan().any()
        assert pick(scores).item() == best


def test_greedy_is_argmax_with_ties_to_the_lower_id() -> None:
    """Without temperature the scores are the log-probabilities, and equal tokens yield the first."""
    logp, batch = one_node([1.0, 4.0, 4.0, 2.0], Knobs(temperature=0.0, seed=3))
    assert pick(perturb(logp[None, None], batch, torch.tensor([[0]]))).tolist() == [[1]]


def mixed_batch(vocab: int) -> SamplingBatch:
    rows = [Knobs(1.0, seed=1), Knobs(0.0, seed=2), Knobs(0.6, top_k=5, seed=1), Knobs(1.0, seed=1, choice=1)]
    return sampling_batch(rows, vocab)


def test_level_noise_is_the_noise_of_perturb() -> None:
    """Noise made once a cycle and looked up by depth gives bit for bit what `perturb` gives a position."""
    vocab = 40
    batch = mixed_batch(vocab)
    logp = torch.randn(4, 5, vocab).log_softmax(-1)
    first, depth = torch.tensor([10, 20, 30, 10]), torch.tensor([[0, 1, 1, 2, 3]]).expand(4, -1)
    noise = sampling.level_noise(batch, first, 4, vocab, logp.dtype)
    scores = perturb(logp, batch, first.unsqueeze(1) + depth)
    assert_close(sampling.add_noise(logp, noise, depth), scores, "bitwise")
    shared = perturb(logp, batch, first.unsqueeze(1))
    assert_close(shared, perturb(logp, batch, first.unsqueeze(1).expand(-1, 5)), "bitwise")
    assert torch.equal(scores[1], logp[1])
    assert not torch.equal(scores[0] - logp[0], scores[3] - logp[3])  # choices of one request differ


def test_no_noise_is_made_for_greedy_rows() -> None:
    """Where no row samples, `perturb` returns its input and noise made once is zero."""
    batch = sampling_batch([Knobs(temperature=0.0)] * 2, 6)
    logp = torch.randn(2, 3, 6)
    noise = sampling.level_noise(batch, torch.tensor([3, 4]), 2, 6, logp.dtype)
    assert perturb(logp, batch, torch.zeros(2, 3).long()) is logp
    assert_close(sampling.add_noise(logp, noise, torch.tensor([[0, 1, 1]]).expand(2, -1)), logp, "bitwise")
    assert sampling.child_values(logp, logp, batch) is logp


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_child_values(tau: float) -> None:
    """A child's value is log_softmax(scores / tau) where the row samples, else its log-probability."""
    batch = mixed_batch(12)
    logp = torch.randn(4, 2, 12, dtype=torch.float64).log_softmax(-1)
    logp[0, 0, 3] = -math.inf
    scores = perturb(logp, batch, torch.tensor([[1, 2]]).expand(4, -1))
    values = sampling.child_values(scores, logp, batch, tau)
    assert_close(values[0], (scores[0] / tau).log_softmax(-1), "bitwise")
    assert_close(values[1], logp[1], "bitwise")
    assert values[0, 0, 3] == -math.inf
    assert (values <= 0).all()


def test_a_bias_is_added_behind_the_penalties_and_bans_end_at_their_position() -> None:
    """2 / 2 + 1.5 for a token that is written and biased; a banned token is possible from ban_until on."""
    knobs = Knobs(0.0, repetition=2.0, bias=((0, 1.5),), banned=(1,), ban_until=9)
    counts = torch.tensor([[1, 0, 0]], dtype=torch.int32)
    batch = sampling_batch([knobs], 3, counts)
    nothing = torch.zeros(1, 2, 0, dtype=torch.int64)
    logits = torch.tensor([2.0, 5.0, 1.0], dtype=torch.float64).expand(1, 2, 3)
    logp = process_logits(logits, batch, nothing, nothing.bool(), torch.tensor([[8, 9]]))[0]
    expected = torch.tensor([[2.5, -math.inf, 1.0], [2.5, 5.0, 1.0]], dtype=torch.float64)
    assert_close(logp, expected.log_softmax(-1), "fp64")


def test_a_node_whose_grammar_allows_nothing_picks_no_token() -> None:
    """Others of its row are unaffected, and the last word's bits beyond the vocabulary are not read."""
    words = torch.tensor([[[0, 0], [0, 1 << 3], [-1, ~(1 << 3)]]], dtype=torch.int32)
    batch = sampling_batch([Knobs(0.0)], 36, grammar=words)
    logits = torch.zeros(1, 3, 36)
    logits[..., 35] = 1.0
    nothing = torch.zeros(1, 3, 0, dtype=torch.int64)
    logp = process_logits(logits, batch, nothing, nothing.bool())
    assert pick(logp).tolist() == [[NO_TOKEN, 35, 0]]
    assert sampling.unpack_bits(words[0, 1], 36).nonzero().flatten().tolist() == [35]


@pytest.mark.parametrize("vocab", [6, 40, 5001])
def test_token_logprobs_are_the_best_in_order_with_ties_to_the_lower_id(vocab: int) -> None:
    """Beside each chosen token's own; short vocabularies leave entries of -inf."""
    logp = torch.randint(0, 9, (2, 3, vocab)).double().log_softmax(-1)
    tokens = torch.randint(0, vocab, (2, 3))
    values, ids = sampling.token_logprobs(logp, tokens)
    assert values.shape == ids.shape == (2, 3, 1 + sampling.MAX_LOGPROBS)
    for b in range(2):
        for m in range(3):
            own = logp[b, m].float().tolist()
            best = sorted(range(vocab), key=lambda v: (-own[v], v))[: sampling.MAX_LOGPROBS]
            assert ids[b, m].tolist()[: 1 + len(best)] == [int(tokens[b, m]), *best]
            assert values[b, m].tolist()[: 1 + len(best)] == [own[v] for v in [int(tokens[b, m]), *best]]
            assert values[b, m, 1 + len(best) :].tolist() == [-math.inf] * (sampling.MAX_LOGPROBS - len(best))


def test_logprobs_are_of_the_processed_distribution_or_the_model_s_own() -> None:
    """By row; filtered tokens are -inf in the first and what the model says in the second."""
    batch = sampling_batch([Knobs(0.5, top_k=1), Knobs(0.5, top_k=1)], 3)
    batch = replace(batch, raw_logprobs=torch.tensor([False, True]))
    logits = torch.tensor([1.0, 3.0, math.nan], dtype=torch.float64).expand(2, 1, 3)
    path = sampling.path_or_empty(logits, replace(batch, any_penalty=False), None)
    adjusted = sampling.adjust_logits(logits, batch, *path)
    values, ids = sampling.chosen_logprobs(logits, adjusted, batch, torch.tensor([[1], [1]]))
    assert ids[:, 0, :2].tolist() == [[1, 1], [1, 1]]
    assert values[0, 0, :3].tolist() == [0.0, 0.0, -math.inf]
    own = torch.tensor([1.0, 3.0], dtype=torch.float64).log_softmax(-1).float()
    assert values[1, 0, :4].tolist() == [own[1], own[1], own[0], -math.inf]
