"""Short prefills as chains leave behind exactly what a prefill step does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.prefill import CHAIN, HEADER, MAX_CHAINS, chain_step, chains_of
from nextn.engine.scheduler import PrefillBatch
from nextn.engine.worker import Worker
from tests.compare import assert_close
from tests.tiny import TINY, prompt_of, request, tiny_engine

OPTIONS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 10, "top_p": 0.9, "frequency_penalty": 0.4, "logit_bias": ((5, 1.0),),
}  # fmt: skip


def _chunks(engine: Engine, lengths: tuple[int, ...], **options: Any) -> PrefillBatch:
    """The first prefill step of new requests with prompts of these lengths."""
    for index, length in enumerate(lengths):
        engine.add(request(str(index), prompt_of(length, index), seed=index, **options))
    batch = engine.scheduler.next_batch()
    assert isinstance(batch, PrefillBatch)
    return batch


def _run(engine: Engine, batch: PrefillBatch, padding: int) -> list[int]:
    """The batch as chains with padding behind; the tokens that end prompts."""
    state = engine.worker.state
    chains = chains_of(batch.chunks)
    assert chains is not None
    nothing = [state.scratch_row, *[0] * (HEADER + 2 * CHAIN - 1)]
    packed = torch.tensor([*chains, *[nothing] * padding])
    with torch.inference_mode():
        result = chain_step(engine.worker.models, state, packed, engine.worker.options)
    return [row[1] for row in result.tolist()[: sum(chunk.is_last for chunk in batch.chunks)]]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, OPTIONS], ids=["greedy", "everything"])
@pytest.mark.parametrize("lengths", [(5,), (64, 1), (65, 20, 130), (300, 40)])
def test_chains_leave_what_a_prefill_step_leaves(lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    """Tokens, both caches, rows and counts, chunk after chunk; free pages and padding rows hold NaN."""
    engines = [tiny_engine(chunked_prefill_size=200, prefix_cache=False) for _ in range(2)]
    batches = [_chunks(engine, lengths, **options) for engine in engines]
    while True:
        for engine, batch in zip(engines, batches, strict=True):
            for chunk in batch.chunks:
                engine._start(chunk.entry)
                engine.worker._set_pages(chunk.entry)
        expected = engines[0].worker.prefill(batches[0].chunks).wait().tokens
        assert _run(engines[1], batches[1], padding=2) == [tokens[0] for tokens in expected]
        first, second = (engine.worker.state for engine in engines)
        for chunk, other in zip(batches[0].chunks, batches[1].chunks, strict=True):
            assert (chunk.entry.row, chunk.entry.pages) == (other.entry.row, other.entry.pages)
            row, used = chunk.entry.row, chunk.start + chunk.length
            places = [engines[0].worker._slots(chunk.entry, 0, used)]
            flat = [state.cache.flatten(1, 2)[:, places[0]] for state in (first, second)]
            assert_close(flat[1], flat[0], "fp64", what="latents")
            for name in ("n", "draft_len", "draft_state"):
                assert_close(getattr(second, name)[row], getattr(first, name)[row], "fp64", what=name)
            if chunk.is_last:
                assert second.root[row] == first.root[row]
            if "frequency_penalty" in options:  # else nobody reads them
                assert torch.equal(second.sampling.counts[row], first.sampling.counts[row])
        assert second.n[second.scratch_row] == second.draft_len[second.scratch_row] == 0
        following = [engine.scheduler.next_batch() for engine in engines]
        if not all(isinstance(batch, PrefillBatch) for batch in following):
            break
        batches = [batch for batch in following if isinstance(batch, PrefillBatch)]


@pytest.mark.parametrize("spec", [None, SpecConfig(2, 4, 4)], ids=["plain", "2/4/4"])
def test_a_chain_s_padding_has_positions_up_to_the_longest_prompt(spec: SpecConfig | None) -> None:
    """Its 64 positions are all read, whatever it holds: none may lie behind the table of angles."""
    config = EngineConfig(
        spec=spec, load_format="dummy", device="cpu", num_pages=8, max_model_len=130, chunked_prefill_size=129
    )
    cfg = ModelConfig.from_dict(TINY)
    engine = Engine(Worker.build(None, cfg, config), config, None, frozenset())
    batch = _chunks(engine, (129,), max_tokens=1)
    for chunk in batch.chunks:
        engine._start(chunk.entry)
        engine.worker._set_pages(chunk.entry)
    assert len(_run(engine, batch, padding=1)) == 1


def test_long_chunks_and_long_prefixes_are_no_work_for_chains() -> None:
    """They would cost more arithmetic than launching a prefill step costs time."""
    engine = tiny_engine(chunked_prefill_size=8192, num_pages=256, max_model_len=2048)
    batch = _chunks(engine, (MAX_CHAINS * CHAIN,))
    assert len(chains_of(batch.chunks) or ()) == MAX_CHAINS
    longer = _chunks(tiny_engine(chunked_prefill_size=8192, num_pages=256, max_model_len=2048), (1025,))
    assert chains_of(longer.chunks) is None
