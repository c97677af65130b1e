"""The engine: requests in, outputs out, one step at a time, by one thread (any may call `validate`, `check`).

A request ends with exactly one final output: by a stop token, a stop string, its token limit, an abort, or an
error where no token can follow.
Steps form a pipeline: the next one is planned and launched while the one before runs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.grammar import CompiledGrammar, Grammars, Vocabulary
from nextn.engine.launched import PIPELINE_DEPTH, Launched, LaunchedPrefill
from nextn.engine.pace import PrefillPace
from nextn.engine.pages import PagePool
from nextn.engine.prefill import CHAIN, MAX_CHAINS
from nextn.engine.request import (
    MAX_BANNED,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from nextn.engine.scheduler import PrefillBatch, Running, Scheduler
from nextn.engine.stats import Stats, StepReport
from nextn.engine.worker import Worker
from nextn.errors import ConfigError, RequestError
from nextn.kernels.ops import has_kernels
from nextn.kernels.ref.sampling import NO_TOKEN
from nextn.text import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)


WARM_UP_PREFIX = 8 * 1024
"""Tokens of a prefix so long that the tiles of attention are cut for a short chunk behind it."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What the engine keeps of an open request besides the scheduler's entry.

    entry: the one whose row was prepared last; None before the request first starts. cached_tokens: prompt
    tokens that it took from the prefix cache then.
    """

    request: Request
    seed: int
    detokenizer: Detokenizer | None
    grammar: CompiledGrammar | None = None
    entry: Running | None = None
    cached_tokens: int = 0


class Engine:
    """Continuous batching over one worker.

    Where launching does not wait (captured steps: bfloat16 on a GPU) a step is always under way while the
    host delivers the one before, prefill and decode alike. A row that turns out to have ended then runs once
    too often, unless its token limit was in sight: its tokens are dropped, and as the device runs steps in
    order, whoever gets its pages writes them later.

    depth: steps in flight at most, at most `PIPELINE_DEPTH`; with 1 each lands as soon as it is launched.
    spec: the tree's shape of the next decode step, or None for plain decoding; it may change between steps.
    on_step: called with each step that has landed. on_start: called with the id of a request when its first
    step is launched.
    tokenizer: None with dummy weights, which come without tokenizer files; outputs then carry no text.
    grammars: compiles what a request's text must match; None where there is no tokenizer.
    """

    def __init__(
        self, worker: Worker, config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        vocab = worker.models.cfg.vocab_size
        ends = frozenset(token for token in eos_token_ids if token < vocab)
        self.grammars = (
            Grammars(lambda: Vocabulary.of(tokenizer, vocab, ends)) if tokenizer is not None else None
        )
        self.counters = Stats()
        self.pool = PagePool(worker.num_pages, config.page_size)
        self._pace: PrefillPace | None = None
        if config.max_prefill_ms > 0:
            self._pace = PrefillPace.of(worker.models.cfg, config.max_prefill_ms / 1e3)
        self.scheduler = Scheduler(
            self.pool,
            config.max_running_requests,
            config.chunked_prefill_size,
            config.largest_tree,
            prefix_cache=config.prefix_cache,
            pace=self._pace,
            settled=worker.settled_tokens,
        )
        self._reserve = config.largest_tree
        self._spec: SpecConfig | None = None
        self.set_spec(config.spec if worker.can_draft else None)
        self.depth = PIPELINE_DEPTH if worker.runs_ahead else 1
        self._streams: dict[str, _Stream] = {}
        self._pending: list[Output] = []
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self.on_start: Callable[[str], None] = lambda request_id: None
        self._flying: deque[Launched | LaunchedPrefill] = deque()
        self._landed = 0.0

    @staticmethod
    def from_config(model_dir: Path, config: EngineConfig) -> Engine:
        """Load a checkpoint directory; raises `NextnError` with a sentence when that cannot be done."""
        started = time.perf_counter()
        cfg = ModelConfig.from_dir(model_dir)
        tokenizer = Tokenizer(model_dir) if config.load_format != "dummy" else None
        worker = Worker.build(model_dir, cfg, config)
        if config.spec is not None and not worker.can_draft:
            logger.warning("%s has no NextN layer: decoding runs without speculation", model_dir)
        eos = frozenset(cfg.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())
        engine = Engine(worker, config, tokenizer, eos)
        if worker.graphs is not None:
            engine.warm_up()
        logger.info("model ready after %.1f s", time.perf_counter() - started)
        return engine

    def warm_up(self) -> None:
        """Compute prompts and forget them, so that no request waits for prefill's kernels to compile.

        A prompt with log-probabilities is never computed as chains, however short. This also tells the pace
        how long prefill takes here.
        """
        started = time.perf_counter()
        room = self.pool.num_pages * self.pool.page_size - self._reserve
        longest = min(self.max_model_len - 1, room - 1)
        if longest < 1:
            return
        chunk = self.scheduler.chunk_size
        prefix = -(-WARM_UP_PREFIX // chunk) * chunk
        behind = prefix + min(chunk, MAX_CHAINS * CHAIN + 1)
        for length in (min(behind, longest), *self._distinct_sizes(chunk)):
            if length > longest:
                continue
            params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=0)
            self.add(Request("warm-up", [0] * length, params))
            while self.has_work():
                self.step()
            self.scheduler.cache.clear()
        self.counters = Stats()
        logger.info("warmed up prefill in %.1f s", time.perf_counter() - started)

    def _distinct_sizes(self, most: int) -> list[int]:
        """Numbers of tokens up to `most` that between them choose every kernel that any choose.

        The experts' kernels say so themselves. The others choose at most once between two powers of two.
        """
        cfg = self.worker.models.cfg
        sizes = {1, *(1 << bit for bit in range(4, most.bit_length())), most}
        if cfg.n_routed_experts and has_kernels(self.worker.state.cache):
            from nextn.kernels.moe import distinct_sizes  # brings Triton, which there is where kernels run

            sizes.update(distinct_sizes(cfg.num_experts_per_tok, cfg.n_routed_experts, most))
        return sorted(sizes)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.worker.max_model_len

    @property
    def spec(self) -> SpecConfig | None:
        """Shape of the next decode step."""
        return self._spec

    def set_spec(self, spec: SpecConfig | None) -> None:
        """Change the tree's shape from the next step on; raises `ConfigError` when it cannot run here."""
        if spec is not None and not self.worker.can_draft:
            raise ConfigError("this engine was built without a NextN layer; it can only decode plainly")
        vocab = self.worker.models.cfg.vocab_size
        if spec is not None and spec.topk > vocab:
            raise ConfigError(f"--topk {spec.topk} is above the vocabulary of {vocab}; use {vocab} or less")
        if spec is not None and spec.draft_tokens > self._reserve:
            raise ConfigError(
                f"a tree of {spec.draft_tokens} tokens is above the {self._reserve} that this engine "
                f"reserved; raise max_draft_tokens"
            )
        self._spec = spec

    def validate(self, prompt_tokens: list[int], params: SamplingParams) -> CompiledGrammar | None:
        """Raise `RequestError` unless a request with this prompt can run when it is alone.

        Returns its grammar, for `Request.compiled`: compiling may take seconds, too long for `add`.
        """
        self.check(prompt_tokens, params)
        return self._compile(params)

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        """All of `validate` but whether the grammar itself is of use; for `Request.is_checked`."""
        if not prompt_tokens:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        vocab = self.worker.models.cfg.vocab_size
        if set(map(type, prompt_tokens)) != {int}:
            raise RequestError("the prompt must be token ids, whole numbers", "prompt")
        if min(prompt_tokens) < 0 or max(prompt_tokens) >= vocab:
            raise RequestError(f"the prompt has a token id outside 0..{vocab - 1}", "prompt")
        length = len(prompt_tokens) + params.max_tokens
        if length > self.max_model_len:
            raise RequestError(
                f"this model's maximum context length is {self.max_model_len} tokens, but {length} were "
                f"asked for ({len(prompt_tokens)} in the prompt, {params.max_tokens} to generate); "
                f"shorten one of them",
                "prompt" if len(prompt_tokens) >= self.max_model_len else "max_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model lacks", "stop")
        self._check_pages(length)
        biased = max((token for token, _ in params.logit_bias), default=0)
        if biased >= vocab:
            raise RequestError(f"logit_bias names token {biased}, outside 0..{vocab - 1}", "logit_bias")
        if len(banned := self._banned(params)) > MAX_BANNED:
            raise RequestError(
                f"min_tokens can hold back {MAX_BANNED} token ids at most, EOS included, not {len(banned)}; "
                f"name fewer stop_token_ids",
                "stop_token_ids",
            )
        if params.grammar is not None:
            self._check_grammar(params)

    def _check_pages(self, length: int) -> None:
        """Raise `RequestError` unless the cache holds `length` tokens and a step behind them."""
        needed = self.pool.pages_for(length + self._reserve)
        if needed > self.pool.num_pages:
            raise RequestError(
                f"{length} tokens, of prompt and output together, need {needed} cache pages of "
                f"{self.pool.page_size} tokens; this engine has {self.pool.num_pages}",
                "max_tokens",
            )

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raise `RequestError` for a grammar that has no place here, or not beside the other options."""
        if self.grammars is None:
            raise RequestError("structured output needs a tokenizer, which this model lacks", "grammar")
        if not self.eos_token_ids:
            raise RequestError(
                "structured output needs an end-of-sequence token, which this model lacks", "grammar"
            )
        if params.ignore_eos:
            raise RequestError(
                "ignore_eos and a grammar exclude each other: EOS ends what the grammar is", "ignore_eos"
            )
        if params.min_tokens:
            raise RequestError(
                "min_tokens and a grammar exclude each other: the grammar says when to end", "min_tokens"
            )

    def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The request's grammar; raises `RequestError` for one that cannot be followed to its end."""
        if params.grammar is None or self.grammars is None:
            return None
        return self.grammars.compile(params.grammar)

    def _banned(self, params: SamplingParams) -> list[int]:
        """Token ids that must not come before `min_tokens`: those that would end the request."""
        if params.min_tokens == 0:
            return []
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        return sorted(token for token in ends if 0 <= token < self.worker.models.cfg.vocab_size)

    def add(self, request: Request) -> None:
        """Queue a request; raises `RequestError` and keeps nothing of it when it cannot run."""
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if type(request.priority) is not int:
            raise RequestError(f"priority is {request.priority!r}; it must be a whole number", "priority")
        if not isinstance(request.cache_salt, str | None):
            raise RequestError(f"cache_salt is {request.cache_salt!r}; it must be a string", "cache_salt")
        if not request.is_checked:
            self.check(request.prompt_tokens, request.params)
        grammar = request.compiled or self._compile(request.params)
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        detokenizer = Detokenizer(self.tokenizer, request.params.stop) if self.tokenizer else None
        self._streams[request.request_id] = _Stream(request, seed, detokenizer, grammar)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; its final output comes with the next step. Unknown or ended ids are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self.scheduler.remove(request_id)
        self.counters.aborted += 1
        self._pending.append(_output(stream, "", (), "abort", None))

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._streams or self._pending or self._flying)

    def step(self) -> list[Output]:
        """Launch the next step, and return what has come meanwhile; waits only where `depth` are in flight.

        A step that cannot be planned without the outcome of those in flight is launched after they land. So
        is one whose launch takes the host long: tokens that come meanwhile would be delivered late.
        """
        outputs, self._pending = self._pending, []
        if self._delivers_first():
            while self._flying:
                outputs += self._land()
            return outputs
        while not self._launch() and self._flying:
            outputs += self._land()
        while len(self._flying) >= self.depth:
            outputs += self._land()
        return outputs

    def _launch(self) -> bool:
        """Plan the next step and start it; False if there is none, or none yet."""
        if self._awaits_tokens():
            return False
        batch = self.scheduler.next_batch(in_flight=bool(self._flying))
        if batch is None:
            return False
        if isinstance(batch, PrefillBatch):
            for chunk in batch.chunks:
                self._start(chunk.entry)
            self._flying.append(self.worker.prefill(batch.chunks))
        else:
            self._flying.append(self.worker.launch(batch.entries, self._spec))
        return True

    def _delivers_first(self) -> bool:
        """Whether tokens are in flight, and the step to launch next would hold up their delivery."""
        if not any(isinstance(flying, Launched) for flying in self._flying):
            return False
        entries = self.scheduler.upcoming_prefill()
        return bool(entries) and self.worker.launches_slowly(entries)

    def _awaits_tokens(self) -> bool:
        """Whether tokens in flight decide what may follow them: a grammar's masks come from the host."""
        rows = (entry for flying in self._flying for entry in flying.entries)
        return any(entry.request.params.grammar is not None for entry in rows)

    def _start(self, entry: Running) -> None:
        """Prepare the row of a request before its first chunk since it was admitted."""
        stream = self._streams[entry.request.request_id]
        if stream.entry is entry:
            return
        if stream.entry is None:
            stream.cached_tokens = entry.cached
            self.counters.queried_tokens += len(entry.request.prompt_tokens)
            self.counters.cached_tokens += entry.cached
            self.on_start(entry.request.request_id)
        stream.entry = entry
        matcher = stream.grammar.matcher() if stream.grammar else None
        self.worker.start_row(entry, stream.seed, self._banned(entry.request.params), matcher)

    def stats(self) -> dict[str, float]:
        """A snapshot for logs and metrics."""
        counters = self.counters
        return {
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.num_waiting,
            "preemptions": self.scheduler.num_preemptions,
            "prompt_tokens": counters.prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "queried_tokens": counters.queried_tokens,
            "cached_tokens": counters.cached_tokens,
            "prefill_steps": counters.prefill_steps,
            "decode_steps": counters.decode_steps,
            "finished": counters.finished,
            "aborted": counters.aborted,
            "cycles": counters.acceptance.cycles,
            "emitted": counters.acceptance.emitted,
            "drafted": counters.acceptance.drafted,
            "accepted": counters.acceptance.emitted - counters.acceptance.cycles,
            "accept_length": counters.acceptance.length,
            "pages": self.pool.num_pages,
            "pages_free": self.pool.free,
            "pages_cached": self.scheduler.cache.evictable,
            "pages_used": self.pool.num_pages - self.scheduler.cache.available,
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless pages and open requests add up."""
        self.scheduler.check_integrity()
        known = [r.request_id for r in self.scheduler.waiting]
        known += [entry.request.request_id for entry in self.scheduler.running]
        assert sorted(known) == sorted(self._streams), "open requests and the scheduler's disagree"

    def close(self) -> None:
        """Abort what is open; the outputs of it are dropped.

        A step that raised may have left pages uncomputed that the prefix cache counts as whole, so nothing
        is kept of requests that run.
        """
        for entry in list(self.scheduler.running):
            self.scheduler.discard(entry)
        for request_id in list(self._streams):
            self.abort(request_id)
        self._pending.clear()
        self._flying.clear()

    def _land(self) -> list[Output]:
        """Wait for the oldest step in flight and deliver what it brought."""
        flying = self._flying.popleft()
        if isinstance(flying, LaunchedPrefill):
            return self._land_prefill(flying)
        return self._land_decode(flying)

    def _report(self, kind: Literal["prefill", "decode"], began: float, rows: int, tokens: int) -> None:
        """Say how long the step took that has just landed: since it began, or the one before landed."""
        now, began = time.perf_counter(), max(began, self._landed)
        self._landed = now
        self.on_step(StepReport(kind, rows, tokens, now - began))

    def _land_prefill(self, flying: LaunchedPrefill) -> list[Output]:
        """Deliver the first tokens of requests that are still open."""
        emitted = flying.wait()
        self.counters.prefill_steps += 1
        computed = sum(chunk.length for chunk in flying.chunks)
        self.counters.prompt_tokens += computed
        self._report("prefill", flying.began, len(flying.chunks), computed)
        if self._pace is not None:
            self._pace.observe(flying.chunks, flying.seconds)
        rows = zip(flying.entries, emitted.tokens, emitted.logprobs, strict=True)
        return [self._deliver(entry, tokens, logprobs) for entry, tokens, logprobs in rows if entry.pages]

    def _land_decode(self, flying: Launched) -> list[Output]:
        """Deliver a decode step's tokens to the requests that are still open."""
        emitted = flying.wait()
        self.counters.decode_steps += 1
        self._report("decode", flying.began, len(flying.entries), sum(map(len, emitted.tokens)))
        outputs = []
        rows = zip(flying.entries, emitted.tokens, emitted.logprobs, strict=True)
        for entry, tokens, logprobs in rows:
            if not entry.pages:  # ended or aborted meanwhile
                continue
            entry.length += len(tokens)
            output = self._deliver(entry, tokens, logprobs)
            if flying.drafted and output.token_ids:
                self.counters.acceptance.record(len(output.token_ids), flying.drafted)
                entry.request.acceptance.record(len(output.token_ids), flying.drafted)
            outputs.append(output)
        return outputs

    def _deliver(self, entry: Running, tokens: list[int], logprobs: tuple[TokenLogprobs, ...]) -> Output:
        """Append emitted tokens one by one until the request ends; the rest of the run is dropped."""
        request = entry.request
        stream = self._streams[request.request_id]
        prompt_logprobs = self._prompt_logprobs(request)
        text = ""
        for count, token in enumerate(tokens, start=1):
            if token == NO_TOKEN:
                output = self._fail(entry, text, tuple(tokens[: count - 1]))
                return replace(output, logprobs=logprobs[: count - 1], prompt_logprobs=prompt_logprobs)
            request.output_tokens.append(token)
            piece, reason, stop_reason = self._take(stream, token)
            text += piece
            if reason is not None:
                del self._streams[request.request_id]
                self.scheduler.finish(entry, self.worker.settled_tokens(entry))
                self.counters.finished += 1
                self.counters.generated_tokens += count
                output = _output(stream, text, tuple(tokens[:count]), reason, stop_reason)
                return replace(output, logprobs=logprobs[:count], prompt_logprobs=prompt_logprobs)
        self.counters.generated_tokens += len(tokens)
        output = _output(stream, text, tuple(tokens), None, None)
        return replace(output, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """What goes with a request's first output, if it asks for them."""
        if request.output_tokens or request.params.prompt_logprobs is None:
            return None
        return tuple(request.prompt_logprobs) or (None,)

    def _fail(self, entry: Running, text: str, tokens: tuple[int, ...]) -> Output:
        """End a request without a next token: no finite logit, or none that its grammar allows."""
        reason = self.worker.why_nothing_follows(entry)
        stream = self._streams.pop(entry.request.request_id)
        if stream.detokenizer:
            text += stream.detokenizer.flush()
        if reason is None:
            self.scheduler.discard(entry)
        else:
            self.scheduler.finish(entry, self.worker.settled_tokens(entry))
        self.counters.generated_tokens += len(tokens)
        output = _output(stream, text, tokens, "error", None)
        if reason is None:
            logger.error("request %s: the model computed no finite logit", entry.request.request_id)
            error = "the model computed no finite logit; its weights or its arithmetic are damaged"
            return replace(output, error=error, error_kind="logits")
        error = f"the grammar allows no further token: {reason}"
        return replace(output, error=error, error_kind="grammar", error_field="grammar")

    def _take(self, stream: _Stream, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Text of one token, and why the request ends with it, if it does."""
        params, detokenizer = stream.request.params, stream.detokenizer
        if (token in self.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            # A stop token is no text; what the detokenizer held back is.
            return detokenizer.flush() if detokenizer else "", "stop", token
        may_stop = len(stream.request.output_tokens) >= params.min_tokens
        text = detokenizer.push(token, may_stop=may_stop) if detokenizer else ""
        if detokenizer and detokenizer.stopped is not None:
            return text, "stop", detokenizer.stopped
        if len(stream.request.output_tokens) >= params.max_tokens:
            return text + (detokenizer.flush() if detokenizer else ""), "length", None
        return text, None, None


def _output(
    stream: _Stream,
    text: str,
    tokens: tuple[int, ...],
    reason: FinishReason | None,
    stop_reason: str | int | None,
) -> Output:
    request = stream.request
    return Output(
        request_id=request.request_id,
        text=text,
        token_ids=tokens,
        prompt_tokens=len(request.prompt_tokens),
        completion_tokens=len(request.output_tokens),
        finish_reason=reason,
        stop_reason=stop_reason,
        acceptance=request.acceptance,
        cached_tokens=stream.cached_tokens,
    )
