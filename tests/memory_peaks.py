"""What an engine on a GPU would hold at most during a step, beside weights, rows and cache.

`python -m tests.memory_peaks` runs steps of DeepSeek-V3's real sizes on three layers, one of them dense, and
prints for each case the largest sum of bytes of tensors that were made in one step and lived at a time, and
what the memory plan keeps for it. Three, because a layer's networks run beside what those before them left.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unlaunched import V3, engine_of, in_process, no_launches

RANK: dict[str, Any] = {
    **V3, "vocab_size": 129_280, "hidden_size": 7168, "q_lora_rank": 1536, "intermediate_size": 2304,
    "num_hidden_layers": 3,
}  # fmt: skip
"""One of eight ranks, but for its number of layers."""
WHOLE: dict[str, Any] = {
    **RANK, "num_attention_heads": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
    "n_routed_experts": 16,
}  # fmt: skip
"""All heads and whole networks, but few of them: nobody's tensors grow with their number."""
PROCESSORS, MAX_LEN = 132, 40_000


def peaks() -> dict[str, tuple[int, int]]:
    """By case: bytes found, and bytes planned."""
    found: dict[str, tuple[int, int]] = in_process("tests.memory_peaks")
    return found


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operations make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, counts=False)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            self._note(tensor, counts=True)
        return out

    def _note(self, tensor: object, *, counts: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._live:
            return
        self._live[place] = storage.nbytes() if counts else 0
        self._now += self._live[place]
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, place)

    def _drop(self, place: int) -> None:
        self._now -= self._live.pop(place, 0)


def main() -> None:
    """Run every case."""
    from nextn.kernels import attention, prefill

    attention.INTERPRETED_SPLITS = PROCESSORS
    prefill.expand_entries = _unexpanded  # the only product that is torch's own
    with no_launches():
        print(json.dumps({name: list(case()) for name, case in CASES.items()}))


def _largest(engine: Any, step: str, requests: list[Any]) -> int:
    """Run the requests to their end; the largest peak of their prefill or decode steps."""
    worker, largest = engine.worker, 0
    launch = getattr(worker, step)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        with Peak() as peak:
            flying = launch(*args, **kwargs)
        largest = max(largest, peak.peak)
        return flying

    setattr(worker, step, counted)
    for request in requests:
        engine.add(request)
    while engine.has_work():
        engine.step()
    setattr(worker, step, launch)
    return largest


def _requests(count: int, length: int, max_tokens: int, **params: Any) -> list[Any]:
    from nextn.engine.request import Request, SamplingParams

    params = {"ignore_eos": True, "max_tokens": max_tokens, **params}
    return [Request(str(number), [number + 1] * length, SamplingParams(**params)) for number in range(count)]


EVERYTHING: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": ((3, 1.0),), "min_tokens": 1,
    "logprobs": 20,
}  # fmt: skip


def _unexpanded(entries: Tensor, weight: Tensor) -> Tensor:
    return entries.new_empty(entries.shape[0], weight.shape[0] * weight.shape[1])


def _shapes(config: dict[str, Any]) -> Any:
    from nextn.config import ModelConfig
    from nextn.engine.memory import _Shapes

    return _Shapes.of(ModelConfig.from_dict(config), torch.bfloat16, kernels=True)


def _prefill(
    count: int, length: int, chunk: int = 2048, *, model: dict[str, Any] = RANK, **params: Any
) -> tuple[int, int]:
    from nextn.config import EngineConfig
    from nextn.engine.memory import _prefill_bytes

    settings = {"max_running_requests": count, "chunked_prefill_size": chunk}
    engine = engine_of(model, MAX_LEN, **settings)
    found = _largest(engine, "prefill", _requests(count, length, 1, **params))
    return found, _prefill_bytes(_shapes(model), EngineConfig(**settings), MAX_LEN)


def _decode(count: int, spec: str, *, model: dict[str, Any] = RANK, **params: Any) -> tuple[int, int]:
    from nextn.config import EngineConfig, SpecConfig
    from nextn.engine.memory import _decode_bytes

    settings: dict[str, Any] = {
        "max_running_requests": count, "spec": None if spec == "off" else SpecConfig.parse(spec),
    }  # fmt: skip
    engine = engine_of(model, MAX_LEN, **settings)
    found = _largest(engine, "launch", _requests(count, 70, 6, **params))
    return found, _decode_bytes(_shapes(model), EngineConfig(**settings))


def _catch_up(count: int, *, model: dict[str, Any] = RANK) -> tuple[int, int]:
    """What bringing up the draft takes, which follows a plain step."""
    from nextn.config import EngineConfig
    from nextn.engine.memory import _decode_bytes
    from nextn.engine.request import Request

    engine = engine_of(model, MAX_LEN, max_running_requests=count)
    spec = engine.spec
    requests: list[Request] = _requests(count, 70, 40)
    for request in requests:
        engine.add(request)
    engine.set_spec(None)
    for _ in range(count + 3):
        engine.step()
    engine.set_spec(spec)
    largest = _largest(engine, "_keep_draft", [])
    return largest, _decode_bytes(_shapes(model), EngineConfig(max_running_requests=count))


def _chains(count: int, *, model: dict[str, Any] = RANK) -> tuple[int, int]:
    """What `count` short prompts of one chain each take, as a graph would compute them."""
    from nextn.engine.memory import _chain_bytes
    from nextn.engine.prefill import CHAIN, HEADER, chain_step

    worker = engine_of(model, MAX_LEN, max_running_requests=count).worker
    chains = torch.zeros(count, HEADER + 2 * CHAIN, dtype=torch.int64)
    chains[:, 0], chains[:, 2:HEADER] = torch.arange(count), torch.tensor([CHAIN, 1, 1])
    with torch.inference_mode(), Peak() as peak:
        chain_step(worker.models, worker.state, chains, worker.options)
    return peak.peak, _chain_bytes(_shapes(model))


CASES = {
    "prefill 1 x 2048": lambda: _prefill(1, 2048),
    "prefill 1 x 8192": lambda: _prefill(1, 8192, 8192),
    "prefill 1 x 2048 behind 8k, all heads": lambda: _prefill(1, 10_240, model=WHOLE),
    "prefill 256 x 8, every option": lambda: _prefill(256, 8, **EVERYTHING),
    "prefill 1 x 512 by 128, prompt log-probabilities": lambda: _prefill(1, 512, 128, prompt_logprobs=5),
    "decode 16 x 4": lambda: _decode(16, "2/4/4"),
    "decode 64 x 4, every option": lambda: _decode(64, "2/4/4", **EVERYTHING),
    "decode 64 x 4 of a chain, every option": lambda: _decode(64, "3/1/4", **EVERYTHING),
    "decode 16 x 4 of a deep tree, every option": lambda: _decode(16, "20/3/4", **EVERYTHING),
    "decode 16 x 32, every option": lambda: _decode(16, "5/8/32", **EVERYTHING),
    "decode 1 x 64, every option": lambda: _decode(1, "9/8/64", **EVERYTHING),
    "decode 1 x 1": lambda: _decode(1, "off"),
    "catch-up 16": lambda: _catch_up(16),
    "catch-up 16, all heads": lambda: _catch_up(16, model=WHOLE),
    "chains 16": lambda: _chains(16),
    "chains 16, all heads": lambda: _chains(16, model=WHOLE),
}
"""Each gives the bytes found and those planned."""


if __name__ == "__main__":
    main()
