"""Which kernels an engine on a GPU would have to compile while it serves, found on a machine without one.

`python -m tests.launch_keys MODEL` lets an engine warm up, then gives it prompts of many lengths, and prints
the kernels of which a prompt asked for a variant that the warm-up had not, with the lengths.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from tests.unlaunched import V2, V3, engine_of, in_process, no_launches

CHUNK = 2000
MODELS = {"v3": V3, "v2": V2}


def late_kernels(model: str) -> dict[str, list[int]]:
    """Kernels that a request to one of MODELS would wait for, and the prompt lengths that ask for them."""
    found: dict[str, list[int]] = in_process("tests.launch_keys", model)
    return found


def main() -> None:
    """Warm an engine up, then note what prompts of other lengths ask for besides."""
    asked: set[tuple[str, str]] = set()
    with no_launches(lambda name, key: asked.add((name, key))):
        engine = engine_of(MODELS[sys.argv[1]], 16 * CHUNK, chunked_prefill_size=CHUNK)
        engine.warm_up()
        known, late = set(asked), {}
        for length in _lengths():
            asked.clear()
            _prefill(engine, length)
            for name, _ in asked - known:
                late.setdefault(name, []).append(length)
    print(json.dumps(late))


def _prefill(engine: Any, length: int) -> None:
    from nextn.engine.request import Request, SamplingParams

    engine.add(Request(str(length), [0] * length, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    engine.scheduler.cache.clear()


def _lengths() -> list[int]:
    """Short ones, the edges of every power of two, and others; some take several chunks."""
    draw = random.Random(0)
    edges = [(1 << bit) + off for bit in range(5, 11) for off in (-1, 0, 1, 16)]
    return sorted({*range(1, 19), *edges, CHUNK, *draw.sample(range(20, CHUNK), 30), 9 * CHUNK + 640})


if __name__ == "__main__":
    main()
