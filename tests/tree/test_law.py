"""The law of speculation: what is emitted has the target's distribution and does not depend on the tree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.kernels.ref.sampling import process_logits
from tests.strategies import Knobs, sampling_batch
from tests.tree.toy import PROMPT, Toy, exact_law, run, seeds

SETTINGS = {
    "T=1": Knobs(1.0),
    "T=0.6": Knobs(0.6),
    "T=1.7 top_k": Knobs(1.7, top_k=3),
    "T=1 top_p": Knobs(1.0, top_p=0.8),
    "T=0.8 min_p": Knobs(0.8, min_p=0.15),
    "T=1.3 all": Knobs(1.3, top_k=4, top_p=0.9, min_p=0.05),
    "T=1 bias": Knobs(1.0, bias=((0, 1.5), (3, -2.0))),
    "T=0.9 bans": Knobs(0.9, banned=(1, 3), ban_until=4),
    "T=1.1 bias and bans": Knobs(1.1, top_p=0.9, bias=((2, 1.0),), banned=(2, 4), ban_until=3),
}
SHAPES = ("1/1/2", "1/3/4", "2/2/4", "2/4/4", "3/1/4", "3/3/8", "4/2/10")
PENALTIES = Knobs(1.0, frequency=0.4, presence=0.3, repetition=1.3)


def chi_square_p(observed: Tensor, probability: Tensor) -> float:
    """P(a chi-square this large) for counts of cells; cells expected fewer than 5 times are pooled."""
    expected = probability.double() * observed.sum()
    rare = expected < 5
    if rare.any():
        assert observed[(probability == 0)].sum() == 0, "a text of probability 0 was emitted"
        observed = torch.cat((observed[~rare], observed[rare].sum().view(1)))
        expected = torch.cat((expected[~rare], expected[rare].sum().view(1)))
        observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def counts(texts: Tensor, vocab: int) -> Tensor:
    """How often each text occurs: texts [B, n] -> [vocab ** n]."""
    powers = vocab ** torch.arange(texts.shape[1] - 1, -1, -1)
    return (texts * powers).sum(dim=1).bincount(minlength=vocab ** texts.shape[1])


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_emitted_text_has_the_target_law(name: str, coupled: bool) -> None:
    """First tokens, pairs and triples match the exact processed distribution on random trees."""
    number = list(SETTINGS).index(name)
    toy = Toy.random(vocab=5 + number % 4, seed=number)
    shape = SHAPES[1 + number % (len(SHAPES) - 1)] if coupled else "2/2/4"
    texts = run(toy, seeds(SETTINGS[name], 20000), 3, SpecConfig.parse(shape), coupled).tokens
    for length in (1, 2, 3):
        p = chi_square_p(counts(texts[:, :length], toy.vocab), exact_law(toy, SETTINGS[name], length))
        assert p > 1e-3, f"texts of {length} tokens: p = {p:.2g}"


def test_chi_square_sees_a_wrong_law() -> None:
    """The yardstick is sharp enough: a law off by 0.03 in total variation fails."""
    toy = Toy.random(vocab=5, seed=0)
    texts = run(toy, seeds(Knobs(1.0), 20000), 1, SpecConfig(1, 3, 4)).tokens
    law = exact_law(toy, Knobs(1.0), 1)
    wrong = law.clone()
    wrong[law.argmax()] -= 0.03
    wrong[law.argmin()] += 0.03
    assert chi_square_p(counts(texts, 5), law) > 1e-3
    assert chi_square_p(counts(texts, 5), wrong) < 1e-6


MIXED = [*SETTINGS.values(), Knobs(0.0), Knobs(0.0, repetition=1.5), PENALTIES, Knobs(0.4, presence=-0.8)]
MIXED += [Knobs(0.0, bias=((1, 1.0), (5, -3.0)), banned=(2, 0), ban_until=9, frequency=0.2)]


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_text_does_not_depend_on_the_tree(shape: str, coupled: bool) -> None:
    """For each seed the text is plain decoding's, token for token: greedy, filtered, with penalties."""
    toy = Toy.random(vocab=8, seed=7)
    rows = [row for knobs in MIXED for row in seeds(knobs, 20)]
    plain = run(toy, rows, 24, None).tokens
    speculated = run(toy, rows, 24, SpecConfig.parse(shape), coupled)
    assert torch.equal(speculated.tokens, plain)
    assert speculated.accepted.mean() > 0.1


def test_text_does_not_depend_on_the_batch() -> None:
    """A row alone emits what it emits among rows with other parameters."""
    toy = Toy.random(vocab=8, seed=8)
    spec = SpecConfig(2, 3, 6)
    rows = [row for knobs in MIXED for row in seeds(knobs, 2)]
    whole = run(toy, rows, 16, spec).tokens
    for number in range(0, len(rows), 3):
        assert torch.equal(run(toy, rows[number : number + 1], 16, spec).tokens[0], whole[number])


def test_different_seeds_and_choices_give_different_texts() -> None:
    """Neither the seed nor the choice index is lost on the way to the noise."""
    toy = Toy.random(vocab=8, seed=9)
    rows = [Knobs(1.0, seed=seed, choice=choice) for seed in (0, 1, -1, 1 << 32) for choice in (0, 1)]
    texts = run(toy, rows, 24, SpecConfig(2, 2, 4)).tokens.tolist()
    assert len({tuple(text) for text in texts}) == len(rows)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_coupled_drafting_accepts_more(temperature: float) -> None:
    """Ranking children with the target's own noise raises acceptance and leaves the text as it was."""
    toy = Toy.random(vocab=8, seed=10, noise=0.5)
    rows = seeds(Knobs(temperature), 400)
    spec = SpecConfig(2, 2, 4)
    coupled, alone = run(toy, rows, 24, spec, coupled=True), run(toy, rows, 24, spec, coupled=False)
    assert torch.equal(coupled.tokens, alone.tokens)
    assert coupled.accepted.mean() > 1.1 * alone.accepted.mean()


def test_perfect_draft_is_always_accepted() -> None:
    """A draft equal to the target is accepted to its full depth at any temperature when it is coupled."""
    toy = Toy.random(vocab=8, seed=11, noise=0.0)
    rows = [row for knobs in MIXED for row in seeds(knobs, 5)]
    accepted = run(toy, rows, 24, SpecConfig(3, 1, 4)).accepted
    assert torch.equal(accepted, torch.full_like(accepted, 3.0))


def test_child_of_probability_0_is_never_accepted() -> None:
    """A draft that proposes what the target's filters removed gets it rejected every time."""
    toy = Toy.random(vocab=6, seed=12)
    worst = Toy(toy.target, -toy.target)  # prefers the target's least likely tokens
    knobs = Knobs(1.0, top_k=2)
    texts = run(worst, seeds(knobs, 500), 12, SpecConfig(2, 4, 12), coupled=False).tokens
    context = torch.cat((torch.tensor(PROMPT).expand(500, 2), texts), dim=1)
    logits = toy.target[context[:, :-2], context[:, 1:-1]]
    nothing = torch.zeros(500, 12, 0, dtype=torch.int64)
    logp = process_logits(logits, sampling_batch(seeds(knobs, 500), 6), nothing, nothing.bool())
    assert logp.gather(2, texts.unsqueeze(2)).isfinite().all()


def test_penalties_repeat_less() -> None:
    """Positive penalties make a text repeat its tokens less: they reach the choice at all."""
    toy = Toy.random(vocab=8, seed=13)
    spec = SpecConfig(2, 3, 6)

    def repeats(knobs: Knobs) -> float:
        tokens = run(toy, seeds(knobs, 200), 16, spec).tokens
        return sum(16 - len(set(text)) for text in tokens.tolist()) / len(tokens)

    assert repeats(PENALTIES) < repeats(Knobs(1.0)) - 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_grammar_at_each_node_gives_the_text_of_plain_decoding(shape: str) -> None:
    """Masks of the nodes alone decide, though the draft does not know them; no text leaves the grammar."""
    toy = Toy.random(vocab=8, seed=14)
    allowed = torch.tensor([0b11010, 0b1, 0b11111111, 0b10100100, 0b110, 0b1001000, 0b11, 0b10000000])
    grammar = allowed.int().unsqueeze(1)
    rows = [row for knobs in MIXED for row in seeds(knobs, 10)]
    plain = run(toy, rows, 24, None, grammar=grammar).tokens
    assert torch.equal(run(toy, rows, 24, SpecConfig.parse(shape), grammar=grammar).tokens, plain)
    before = torch.cat((torch.full_like(plain[:, :1], PROMPT[1]), plain[:, :-1]), dim=1)
    assert (allowed[before] >> plain & 1).all()
