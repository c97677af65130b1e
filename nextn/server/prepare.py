"""From a body that came over HTTP to requests for the engine and the reply that they will fill."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nextn.engine.grammar import Compiling, Grammar
from nextn.engine.request import Request
from nextn.errors import RequestError
from nextn.server.bridge import EngineLike
from nextn.server.chat import ChatFormat, ChatParser, Choice, call_grammar
from nextn.server.messages import Message, Tool, ToolChoice, plain
from nextn.server.protocol import (
    COMPLETION_MAX_TOKENS,
    REQUEST_ID,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from nextn.server.replies import Answer, ChatChoice, Echo, Reply, TextChoice, Usage
from nextn.text import Tokenizer

MAX_TOKENIZED_CHARACTERS = 2**20
"""Longest text of /tokenize: megabytes would cost seconds of a core each."""

MAX_ECHOED_LOGPROBS = 2**18
"""Most log-probabilities of prompt tokens in one answer: each is some 24 bytes of JSON."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body that has passed every check, as requests for the engine, in the order of the reply's choices.

    compiling: the requests' grammar on its way, for `Preparer.constrain` when it is there.
    """

    body: Body
    reply: Reply
    requests: list[Request]
    compiling: Compiling | None


class Preparer:
    """Reads bodies for one engine; its methods may run in any thread and raise ApiError.

    served_names: names that a body's `model` may give. max_requests: most answers that one body may ask for.
    """

    def __init__(self, engine: EngineLike, served_names: Sequence[str], max_requests: int) -> None:
        self._engine = engine
        self._served_names = served_names
        self._max_requests = max_requests

    def completion(self, content: bytes) -> Prepared:
        """POST /v1/completions."""
        body = parse_body(CompletionBody, content)
        self._check(body, len(body.prompt))
        grammar = None if body.constraint is None else body.constraint[1]
        tokenizer, choices, requests = self._engine.tokenizer, list[Answer](), list[Request]()
        try:
            for prompt in body.prompt:
                tokens = prompt if isinstance(prompt, list) else self._tokens(body, prompt)
                requests += self._requests(body, tokens, grammar, default=COMPLETION_MAX_TOKENS)
                self._check_echo(body, requests)
                echo = self._echo(prompt, tokens) if body.echo else None
                choices += [
                    TextChoice(
                        len(choices) + choice,
                        tokenizer,
                        with_logprobs=body.top_alternatives is not None,
                        echo=echo,
                        generates=body.max_tokens != 0,
                    )
                    for choice in range(body.choices)
                ]
            compiling = self._begin(grammar)
        except RequestError as error:
            raise body.error(error) from None
        return Prepared(body, self._reply("text", body, choices, requests), requests, compiling)

    def chat(self, content: bytes) -> Prepared:
        """POST /v1/chat/completions."""
        body = parse_body(ChatBody, content)
        self._check(body, 1)
        tools = [plain(tool) for tool in body.tools or ()]
        chosen = plain(body.tool_choice) if isinstance(body.tool_choice, ToolChoice) else body.tool_choice
        try:
            tokenizer = self._tokenizer("prompt")
            messages = [plain(message) for message in body.messages]
            self._refuse_long(body, "".join(each.get("content") or "" for each in messages))
            arguments = body.chat_template_kwargs or {}
            text = self._format.prompt(tokenizer, messages, tools, chosen, **arguments)
            tokens = self._tokens(body, text, add_special_tokens=False)  # the template wrote BOS
            thinking = self._format.thinking(text)
            grammar = self._chat_grammar(body, tools, chosen, thinking)
            requests = self._requests(body, tokens, grammar, default=None)
            compiling = self._begin(grammar)
        except RequestError as error:
            raise body.error(error) from None
        choices = [
            ChatChoice(
                index,
                tokenizer,
                ChatParser.of(self._format, tools=tools, tool_choice=chosen, thinking=thinking),
                with_logprobs=bool(body.logprobs),
                may_call=bool(tools) and chosen != "none",
            )
            for index in range(body.choices)
        ]
        return Prepared(body, self._reply("chat", body, choices, requests), requests, compiling)

    @staticmethod
    def constrain(prepared: Prepared) -> None:
        """Give requests what `compiling` has come to, without waiting; raises ApiError."""
        if prepared.compiling is None:
            return
        try:
            compiled = prepared.compiling.outcome()
        except RequestError as error:
            raise prepared.body.error(error) from None
        for request in prepared.requests:
            request.compiled = compiled

    def tokenize(self, content: bytes) -> dict[str, object]:
        """POST /tokenize: the answer."""
        body = parse_body(TokenizeBody, content)
        self.check_model(body.model)
        try:
            tokenizer = self._tokenizer("model")
            text = body.prompt
            if body.messages is not None:
                text = self._chat_text(tokenizer, body, body.messages, body.tools or ())
            assert text is not None  # a body has one or the other
            if len(text) > MAX_TOKENIZED_CHARACTERS:
                raise RequestError(
                    f"at most {MAX_TOKENIZED_CHARACTERS} characters are tokenized at once",
                    "prompt" if body.messages is None else "messages",
                )
            # A template writes BOS itself.
            special = (
                body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
            )
            tokens = tokenizer.encode(text, add_special_tokens=special)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.field) from None
        spelt = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._engine.max_model_len,
            "tokens": tokens,
            "token_strs": spelt,
        }

    def detokenize(self, content: bytes) -> dict[str, object]:
        """POST /detokenize: the answer; special tokens are spelt out."""
        body = parse_body(DetokenizeBody, content)
        self.check_model(body.model)
        try:
            return {"prompt": self._tokenizer("model").decode(body.tokens, skip_special_tokens=False)}
        except RequestError as error:
            raise ApiError(400, str(error), param=error.field) from None

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served."""
        if name is not None and name not in self._served_names:
            listed = ", ".join(self._served_names)
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {listed}",
                param="model",
                code="model_not_found",
            )

    @cached_property
    def _format(self) -> ChatFormat:
        """How this model's template writes reasoning and calls."""
        return ChatFormat.of(self._tokenizer("prompt"))

    def _chat_text(
        self, tokenizer: Tokenizer, body: TokenizeBody, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> str:
        return self._format.prompt(
            tokenizer,
            [plain(message) for message in messages],
            [plain(tool) for tool in tools],
            None,
            **(body.chat_template_kwargs or {}),
        )

    def _chat_grammar(
        self, body: ChatBody, tools: Sequence[Mapping[str, Any]], chosen: Choice, thinking: bool | None
    ) -> Grammar | None:
        """What an answer must match: calls where they are forced, else the form asked for, or either."""
        return call_grammar(
            tools,
            chosen,
            self._format,
            thinking=thinking,
            parallel=body.parallel_tool_calls is not False,
            otherwise=None if body.constraint is None else body.constraint[1],
        )

    @staticmethod
    def _check_echo(body: Body, requests: Sequence[Request]) -> None:
        """Raise 400 for more log-probabilities of prompts than one answer may carry."""
        if body.echoed_logprobs is None:
            return
        echoed = sum(len(request.prompt_tokens) for request in requests) * (1 + body.echoed_logprobs)
        if echoed > MAX_ECHOED_LOGPROBS:
            raise ApiError(
                400,
                f"echo with logprobs asks for {echoed} log-probabilities of prompt tokens; at most "
                f"{MAX_ECHOED_LOGPROBS} are given in one answer: fewer prompts, answers or alternatives fit",
                param="logprobs",
                code="invalid_value",
            )

    def _check(self, body: Body, prompts: int) -> None:
        self.check_model(body.model)
        if prompts * body.choices > self._max_requests:
            raise ApiError(
                400,
                f"{prompts * body.choices} answers were asked for; this server gives at most "
                f"{self._max_requests} at once",
                param="n" if body.choices > 1 else "prompt",
            )

    def _reply(self, kind: str, body: Body, choices: Sequence[Answer], requests: Sequence[Request]) -> Reply:
        usage = Usage(
            sum(len(request.prompt_tokens) for request in requests[:: body.choices]),
            body.choices,
            with_speculation=bool(body.include_speculation),
            counts_completion=body.token_limit != 0,
        )
        return Reply(kind, body.model or self._served_names[0], choices, usage, body.field_name)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", field)
        return self._engine.tokenizer

    def _tokens(self, body: Body, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a prompt that may fit."""
        self._refuse_long(body, text)
        return self._tokenizer("prompt").encode(text, add_special_tokens=add_special_tokens)

    def _refuse_long(self, body: Body, text: str) -> None:
        """Refuse what cannot fit before it is tokenized, or a template is filled: megabytes take seconds."""
        longest = self._engine.max_model_len
        fewest = self._tokenizer("prompt").fewest_tokens(text)
        if fewest > longest:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but the prompt has at least "
                f"{fewest}; shorten the prompt",
                param=body.field_name("prompt"),
                code="context_length_exceeded",
            )

    def _requests(
        self, body: Body, tokens: list[int], grammar: Grammar | None, *, default: int | None
    ) -> list[Request]:
        """Requests for all answers to one prompt; `default` tokens to generate, None meaning what fits."""
        longest, asked = self._engine.max_model_len, body.token_limit
        room = longest - len(tokens)
        if room < 1 or (asked or 0) > room:
            generated = "" if asked is None else f", {asked} to generate"
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but {len(tokens) + (asked or 1)} "
                f"were asked for ({len(tokens)} in the prompt{generated}); shorten the prompt or the output",
                param=body.field_name("max_tokens" if room >= 1 else "prompt"),
                code="context_length_exceeded",
            )
        limit = asked if asked is not None else room if default is None else min(default, room)
        # No tokens at all: the engine makes one with the prompt's, which the reply leaves out.
        params = body.sampling_params(max(limit, 1), grammar)
        self._engine.check(tokens, params)
        name = f"{REQUEST_ID.get() or 'local'}-{uuid.uuid4().hex}"  # a client may give an id twice
        return [
            Request(
                f"{name}-{choice}",
                tokens,
                params,
                choice=choice,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                is_checked=True,
            )
            for choice in range(body.choices)
        ]

    def _begin(self, grammar: Grammar | None) -> Compiling | None:
        """Have the grammar compiled meanwhile; nothing where there is none, or no engine for it."""
        grammars = self._engine.grammars
        return None if grammar is None or grammars is None else grammars.begin(grammar)

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        """The prompt as its answer repeats it: without a BOS that its text does not have."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return Echo(tokens, "", bare_bos=False)
        starts = tokens[0] == tokenizer.bos_token_id if tokens else False
        if isinstance(prompt, str):
            spelt = tokenizer.token_text(tokens[0]) if starts else ""
            return Echo(tokens, prompt, bare_bos=starts and not prompt.startswith(spelt))
        text = tokenizer.decode(tokens[1:] if starts else tokens, skip_special_tokens=False)
        return Echo(tokens, text, bare_bos=starts)
