"""The offline interface: prompts in, completions out, on the same engine as the server."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nextn.config import EngineConfig
from nextn.engine.engine import Engine
from nextn.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from nextn.engine.stats import Acceptance
from nextn.engine.worker import leave_a_core_free
from nextn.errors import ConfigError, RequestError
from nextn.text import Tokenizer

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """The whole answer to one prompt; log-probabilities, one a token, where they were asked for.

    stop_reason: the stop string or stop token that ended it. error: why it could not go on, where
    finish_reason is "error". cached_tokens: prompt tokens that were found in the prefix cache.
    """

    prompt_tokens: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0


def load_engine(model: str, config: EngineConfig) -> Engine:
    """The engine of a process that is there for nothing else; raises `NextnError`.

    One core stays free, and the garbage collector no longer looks at what loading has left for good, which
    took it a tenth of a second each time, in the middle of somebody's answer.
    """
    leave_a_core_free()
    engine = Engine.from_config(resolve_model(model), config)
    gc.collect()
    gc.freeze()
    return engine


class LLM:
    """Loads a model once and answers batches of prompts.

    model: a checkpoint directory, or 'demo' for the embedded model. Keyword arguments are the fields of
    `EngineConfig`.
    """

    def __init__(self, model: str | Path = "demo", **config: Any) -> None:
        self.engine = Engine.from_config(resolve_model(model), EngineConfig(**config))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt (text or token ids); one completion a prompt, in order.

        Raises `RequestError` before anything runs when one of them cannot be served.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts need as many SamplingParams, not {len(each)}", "params")
        completions = [Completion(self._tokens(prompt)) for prompt in many]
        for completion, own in zip(completions, each, strict=True):
            self.engine.validate(completion.prompt_tokens, own)
        for index, (completion, own) in enumerate(zip(completions, each, strict=True)):
            self.engine.add(Request(str(index), completion.prompt_tokens, own))
        try:
            self._run(completions)
        finally:
            self.engine.close()  # after an error or an interrupt nothing may stay open
        return completions

    def _run(self, completions: list[Completion]) -> None:
        while self.engine.has_work():
            for output in self.engine.step():
                completion = completions[int(output.request_id)]
                completion.token_ids += output.token_ids
                completion.text += output.text
                completion.logprobs += output.logprobs
                if output.prompt_logprobs is not None:
                    completion.prompt_logprobs = list(output.prompt_logprobs)
                completion.acceptance = output.acceptance
                completion.cached_tokens = output.cached_tokens
                if output.finish_reason is not None:
                    completion.finish_reason = output.finish_reason
                    completion.stop_reason, completion.error = output.stop_reason, output.error

    def chat(self, messages: list[dict[str, str]], params: SamplingParams | None = None) -> Completion:
        """Answer one conversation through the checkpoint's own chat template."""
        return self.generate([self.tokenizer.render_chat(messages)], params)[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; raises `RequestError` when it has none."""
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", "prompt")
        return self.engine.tokenizer

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def resolve_model(model: str | Path) -> Path:
    """The directory that MODEL names: itself, or the package's own for 'demo'."""
    if str(model) == "demo":
        from nextn import demo

        return demo.path()
    path = Path(model)
    if not str(model) or not path.is_dir():
        raise ConfigError(f"MODEL {str(model)!r} is not a directory; give a checkpoint directory or 'demo'")
    return path


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many; a sequence of ints is one prompt, an empty sequence none."""
    if isinstance(prompts, str):
        return [prompts]
    numbers = [item for item in prompts if isinstance(item, int)]
    many = [item for item in prompts if not isinstance(item, int)]
    if numbers and many:
        raise RequestError("prompts mixes token ids with whole prompts; give one prompt or a list of prompts")
    return [numbers] if numbers else many
