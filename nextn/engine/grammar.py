"""Constraints on a request's text: which tokens a grammar lets follow, for every node of a tree.

llguidance compiles and matches (docs/structured-output.md says why); without it a request with a grammar is
refused. A node's mask is a function of the tokens before it alone, so speculation changes no text. Schemas
come from strangers: their size, depth and cost are bounded, and what cannot be enforced is refused.

torch is imported where masks are made: the server needs this module before it knows that its flags are right.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from nextn.engine.structural_tag import structural_tag
from nextn.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

    from nextn.text import Tokenizer

GrammarKind = Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]
Refusal = Literal["invalid", "time", "queue"]

MAX_TEXT = 65_536
"""Characters of a schema, an expression or rules."""
MAX_DEPTH = 64
"""Nesting of a schema."""
MAX_CACHED = 32
"""Compiled grammars kept, beside those that are under way; the least recently used one goes first."""
COMPILE_SECONDS = 10.0
"""How long a request waits for its grammar's turn, and then for the work, which the limits below shorten."""
MAX_QUEUED = 64
"""Grammars that may wait for their turn: more could not all have it in time, at the worst cost below."""
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""What llguidance may spend on a grammar and on one mask: the worst expressions tried take 0.25 s and 15 MB
to compile and 20 ms a mask. With the first limit at its default, ten times this, one mask takes 6 s."""

WHITESPACE = r"\x20|\n\x20{0,32}"
"""Between JSON's parts: one space, or a line break and its indent. Without a bound a model may never end."""
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (2, 4, 6, 8, 10, 12, 14, 16, 24, 32)),
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Sets of tokens that a mask takes as a whole. The library's own know strings of 10 and 30 characters: with
these, strings of a bounded length cost half as much, and the vocabulary a quarter of a second more."""
MAKE_SECONDS = 0.005
"""A grammar that is ready sooner is made anew for each request: masks can then be made side by side."""
ANY_OBJECT = '{"type": "object"}'

STACK_BYTES = 64 << 20
"""Of the threads that compile: llguidance calls itself once a rule or reference, of which MAX_TEXT has room
for thousands, and a stack that ends is the end of the process. Memory is taken only as it is used."""
SHALLOW_TEXT = 4096
"""Characters of a grammar that fits any stack."""

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_MASKERS = ThreadPoolExecutor(min(8, _CORES // 2), "masks") if _CORES >= 4 else None


class _DeepThreads(ThreadPoolExecutor):
    """Threads with stacks of STACK_BYTES."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit, which may start a thread; one that others start at this moment has a large stack too."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            threading.stack_size(before)


_WORKERS = _DeepThreads(max_workers=2, thread_name_prefix="grammar")
"""Compile for all engines of the process: a hostile grammar holds up others, but no request without one."""
_AGAIN = _DeepThreads(max_workers=1, thread_name_prefix="grammar again")
"""Begins deep grammars anew, for threads that have other stacks and must not wait for a hostile one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's text must match: any JSON object, a JSON schema, a regular expression, or EBNF rules.

    ebnf: GBNF (`root ::= ...`) or Lark. structural_tag: see `structural_tag.py`. text is empty for "json".
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """Every token's bytes as they appear in the text; empty where a token adds none, so no grammar takes it.

    encode: the tokenizer's own split of a text: what a grammar forces is written as the model would write it.
    """

    tokens: tuple[bytes, ...]
    eos: frozenset[int]
    encode: Callable[[str], list[int]]

    @staticmethod
    def of(tokenizer: Tokenizer, size: int, eos: frozenset[int]) -> Vocabulary:
        """The tokens of a checkpoint's tokenizer, for a model of `size` tokens."""
        return Vocabulary(
            tuple(tokenizer.token_bytes(token) for token in range(size)),
            eos,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


class GrammarsBusy(RequestError):
    """So many other grammars are to be compiled that this one's turn does not come in time; later it may."""

    def __init__(self) -> None:
        super().__init__(
            "too many other grammars wait to be compiled; this one's turn did not come, try again", "grammar"
        )


class _Job:
    """A grammar that is, will be or has been compiled; `started` when that began."""

    __slots__ = ("future", "started")

    def __init__(self) -> None:
        self.started: float | None = None
        self.future: Future[CompiledGrammar | str]


class Compiling:
    """One request's wait for its grammar: `future` ends when it is compiled, `outcome` says with what."""

    def __init__(self, job: _Job, refused: Callable[[Refusal], None]) -> None:
        self.future = job.future
        self._job, self._refused = job, refused
        self._asked = time.monotonic()

    def patience(self) -> float:
        """Seconds to go on waiting; to be asked again after them, as the work may have begun. 0: no more."""
        if self.future.done():
            return 0.0
        since = self._asked if self._job.started is None else max(self._asked, self._job.started)
        return max(0.0, since + COMPILE_SECONDS - time.monotonic())

    def outcome(self) -> CompiledGrammar:
        """The compiled grammar; raises `RequestError` for one that is of no use or has not come."""
        if not self.future.done():
            if self._job.started is None:
                self._refused("queue")
                raise GrammarsBusy
            self._refused("time")
            raise RequestError(
                f"the grammar took more than {COMPILE_SECONDS:g} s to compile; use a simpler one", "grammar"
            )
        built = self.future.result()
        if isinstance(built, str):
            self._refused("invalid")
            raise RequestError(f"the grammar cannot be used: {built}", "grammar")
        return built


class Grammars:
    """Compiles the grammars of one engine and keeps the last ones; for any thread.

    on_compiled: called with the seconds that each took, on the thread that compiled it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary: called once, when the first grammar comes; it takes a moment."""
        self.on_compiled: Callable[[float], None] | None = None
        self.refused: dict[Refusal, int] = dict.fromkeys(get_args(Refusal), 0)
        """How many grammars were of no use, took too long, or waited in vain for their turn."""
        self.queued = 0
        """How many wait for their turn."""
        self._make_vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._eos: frozenset[int] = frozenset()
        self._preparing = threading.Lock()
        self._cache: OrderedDict[Grammar, _Job] = OrderedDict()
        self._counting = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; raises `RequestError` (field "grammar") for what cannot be enforced."""
        compiling = self.begin(grammar)
        while seconds := compiling.patience():
            wait([compiling.future], seconds)
        return compiling.outcome()

    def begin(self, grammar: Grammar) -> Compiling:
        """Have a grammar compiled, without waiting for it; raises `RequestError` where that cannot begin."""
        _library()
        if len(grammar.text) > MAX_TEXT:
            raise RequestError(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_TEXT} are taken", "grammar"
            )
        try:
            grammar.text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                "the grammar holds a lone surrogate, which is no character", "grammar"
            ) from None
        with self._counting:
            job = self._cache.get(grammar) or self._submit(grammar)
            if job is not None:
                self._cache[grammar] = job
                self._cache.move_to_end(grammar)
            done = [each for each, job in self._cache.items() if job.future.done()]  # the oldest first
            for each in done[: max(0, len(self._cache) - MAX_CACHED)]:
                del self._cache[each]
        if job is None:
            self._refuse("queue")
            raise GrammarsBusy
        return Compiling(job, self._refuse)

    def _submit(self, grammar: Grammar) -> _Job | None:
        """Queue a grammar, if there is room; called under the lock."""
        if self.queued >= MAX_QUEUED:
            return None
        self.queued += 1
        job = _Job()
        job.future = _WORKERS.submit(self._work, job, grammar)
        return job

    def _refuse(self, reason: Refusal) -> None:
        with self._counting:
            self.refused[reason] += 1

    def _work(self, job: _Job, grammar: Grammar) -> CompiledGrammar | str:
        """Compile a grammar whose turn has come; runs on a thread of its own."""
        job.started = time.monotonic()
        with self._counting:
            self.queued -= 1
        built = self._build(grammar)
        if self.on_compiled is not None:
            self.on_compiled(time.monotonic() - job.started)
        return built

    def _build(self, grammar: Grammar) -> CompiledGrammar | str:
        """The compiled grammar, or why there is none."""
        library = _library()
        try:
            text = _to_library(grammar)
        except RecursionError:
            return "it is nested too deeply"
        except ValueError as error:  # RequestError is one too
            return _brief(str(error))
        limits = library.LLParserLimits(**LIMITS)
        tokenizer = self._prepared()
        compiled = CompiledGrammar(
            lambda: library.LLMatcher(tokenizer, text, log_level=0, limits=limits),
            tokenizer.vocab_size,
            self._eos,
            is_deep=len(grammar.text) > SHALLOW_TEXT,
        )
        return compiled.check() or compiled

    def _prepared(self) -> LLTokenizer:
        """llguidance's view of the vocabulary, made once."""
        with self._preparing:
            if self._tokenizer is None:
                vocabulary = self._make_vocabulary()
                adapter = _library().TokenizerWrapper(_Adapter(vocabulary))
                self._eos = vocabulary.eos
                self._tokenizer = _library().LLTokenizer(
                    adapter, eos_token=sorted(vocabulary.eos), slices=list(SLICES)
                )
            return self._tokenizer


class CompiledGrammar:
    """A grammar that can be matched.

    What a matcher finds out about its expressions it shares with its copies, under a lock: right for grammars
    that cost much. Of others each request has its own. Either begins anew when it has grown to a limit.
    make: gives a matcher at the start; called at once. is_deep: whether that may need a deep stack.
    """

    def __init__(
        self, make: Callable[[], LLMatcher], vocab: int, eos: frozenset[int], *, is_deep: bool = False
    ) -> None:
        self.words, self.eos = mask_words(vocab), eos
        self._make, self._is_deep = make, is_deep
        started = time.perf_counter()
        self._prototype = make()
        self._seconds = time.perf_counter() - started
        self._shared = True

    def check(self) -> str | None:
        """Why the grammar is of no use, if so. Makes its first mask, and so learns whether it costs much."""
        if self._prototype.is_error():
            return _brief(self._prototype.get_error())
        started = time.perf_counter()
        reason = self.matcher().check()
        self._seconds += time.perf_counter() - started
        self._shared = _MASKERS is None or self._seconds > MAKE_SECONDS
        return reason

    def matcher(self) -> Matcher:
        """A request's place in the grammar, at its start."""
        return Matcher(self)

    @property
    def is_shared(self) -> bool:
        """Whether its matchers share what they find out."""
        return self._shared

    def start(self, *, anew: bool = False) -> LLMatcher:
        """A matcher of the library at the grammar's start."""
        if self._shared and not anew:
            return self._prototype.deep_copy()
        made: LLMatcher = _AGAIN.submit(self._make).result() if self._is_deep else self._make()
        if not self._shared:
            return made
        self._prototype = made
        return made.deep_copy()


class Matcher:
    """Where one request stands in its grammar, and the masks of what may follow.

    The state is a function of the tokens taken: `advance` takes up a request's output wherever it stands,
    after a preemption too.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._words, self._eos = compiled.words, compiled.eos
        self._inner = compiled.start()
        self._taken: list[int] = []
        self._ahead: tuple[int, ...] = ()  # a draft's tokens that `_inner` has taken on top
        self.error: str | None = None
        """Why no token can follow, once that is so."""

    def check(self) -> str | None:
        """Why the grammar is of no use, if so; computes its first mask."""
        import torch

        self.fill((0,), (-1,), torch.empty(1, self._words, dtype=torch.int32))
        return self.error

    def advance(self, output: Sequence[int]) -> None:
        """Take the tokens of a request's output that are new since the last call."""
        fresh = list(output[len(self._taken) :])
        self._taken += fresh
        if fresh and self.error is None and not self._inner.consume_tokens(fresh):
            self._restart()
            if self._inner.is_error():
                self.error = _brief(self._inner.get_error())

    def fill(self, tokens: Sequence[int], parents: Sequence[int], out: Tensor) -> None:
        """The mask of every node of a tree, into out [D, words] int32 on the host.

        tokens, parents [D], -1 at the root, which `advance` has taken. A node that the grammar rules out, or
        that stands below one or below EOS, keeps what `out` held: no answer comes there. Zeros where nothing
        can follow; at the root `error` then says why.
        """
        import torch

        assert out.dtype == torch.int32, f"masks must be int32, are {out.dtype}"
        assert out.shape == (len(tokens), self._words), f"{len(tokens)} masks are {tuple(out.shape)}"
        assert out.stride(1) == 1, "a mask's words must be adjacent"
        assert not out.is_cuda, "masks are made on the host"
        if self.error is None:
            self.error = self._fill((), out[0])
        bits = out.numpy()
        if self.error is None and not bits[0].any():
            self.error = "no token of the vocabulary can follow"
        if self.error is not None:
            bits[0] = 0
            return
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, len(tokens)):
            token, parent = tokens[node], parents[node]
            allowed = parent in paths and int(bits[parent, token // 32]) >> (token % 32) & 1
            if not allowed or token in self._eos:
                continue
            paths[node] = (*paths[parent], token)
            if self._fill(paths[node], out[node]) is not None:
                del paths[node]  # only a request that really comes here ends by it
                bits[node] = 0
        self._move(())

    def _fill(self, path: tuple[int, ...], out: Tensor) -> str | None:
        """The mask behind a draft's `path`, or why there is none; the own tokens' state is kept then."""
        reason = self._compute(path, out)
        if reason is not None:  # perhaps only because of what all requests together have found out
            self._restart()
            reason = self._compute(path, out)
        if reason is not None:
            self._restart()
        return reason

    def _compute(self, path: tuple[int, ...], out: Tensor) -> str | None:
        inner = self._move(path)
        if not inner.is_error():
            inner.unsafe_compute_mask_ptr(out.data_ptr(), 4 * self._words)
            self._probe(inner, out)
        if inner.is_error():
            return _brief(inner.get_error())
        return "no text matches it" if inner.is_stopped() and not inner.is_accepting() else None

    def _probe(self, inner: LLMatcher, out: Tensor) -> None:
        """Bring out an error that a mask keeps to itself.

        Where another request has brought what they share to a limit, everything seems impossible but the text
        that is forced; such a mask lacks tokens and raises no error, but the next token taken does.
        """
        if not self._compiled.is_shared:
            return
        words = out.numpy()
        places = (32 * word + bit for word in words.nonzero()[0].tolist() for bit in range(32))
        allowed = (place for place in places if words[place // 32] >> (place % 32) & 1)
        token = next((place for place in allowed if place not in self._eos), None)
        if token is not None and inner.consume_token(token):
            inner.rollback(1)

    def _restart(self) -> None:
        """Begin anew at the request's own tokens: a matcher that failed stays so."""
        self._inner, self._ahead = self._compiled.start(anew=True), ()
        self._inner.consume_tokens(self._taken)

    def _move(self, path: tuple[int, ...]) -> LLMatcher:
        """Bring `_inner` behind a draft's `path`."""
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if shared < len(self._ahead):
            self._inner.rollback(len(self._ahead) - shared)
        if shared < len(path):
            self._inner.consume_tokens(list(path[shared:]))
        self._ahead = path
        return self._inner


def run_together(jobs: Sequence[Callable[[], None]]) -> None:
    """Do what must be done for each request of a step, side by side where there are cores to spare."""
    if _MASKERS is None or len(jobs) < 2:
        for job in jobs:
            job()
    else:
        for done in [_MASKERS.submit(job) for job in jobs]:
            done.result()


def mask_words(vocab: int) -> int:
    """Words of 32 tokens in a mask."""
    return -(-vocab // 32)


def _to_library(grammar: Grammar) -> str:
    """llguidance's form of a grammar; raises ValueError for what is none."""
    library = _library()
    if grammar.kind == "json":
        return _json_schema(ANY_OBJECT)
    if grammar.kind == "json_schema":
        return _json_schema(grammar.text)
    if grammar.kind == "structural_tag":
        return structural_tag(grammar.text, _nested)
    return str(library.grammar_from(grammar.kind, grammar.text))


def _nested(kind: str, content: Any) -> dict[str, Any]:
    """A grammar inside of a structural tag, as an entry of llguidance's list of grammars."""
    if kind == "grammar":
        return {"lark_grammar": _library().grammar_from("ebnf", content)}
    whole = (
        _json_schema(json.dumps(content))
        if kind == "json_schema"
        else _library().grammar_from("regex", content)
    )
    entry: dict[str, Any] = json.loads(whole)["grammars"][0]
    return {name: value for name, value in entry.items() if value is not None}


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be a JSON object")
    if nesting(schema) > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return str(_library().LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))


def nesting(value: object) -> int:
    """How deep the objects and lists of JSON data are nested; 1 for a bare value."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _brief(reason: str) -> str:
    """The library's reason as one line of bounded length."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    if "NoExtensionBias" in line:
        return "its rules refer to themselves without ever coming to a text"
    return line if len(line) <= 300 else line[:297] + "..."


def _library() -> Any:
    """llguidance; raises `RequestError` where it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError:
        raise RequestError(
            "structured output needs llguidance, which this installation lacks: pip install llguidance",
            "grammar",
        ) from None


class _Adapter:
    """A vocabulary under the names that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = min(vocabulary.eos)
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)
