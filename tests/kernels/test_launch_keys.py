"""No request waits for a kernel to compile: the engine's warm-up asks for every variant of prefill's."""

from __future__ import annotations

import pytest

from tests.launch_keys import MODELS, late_kernels

pytest.importorskip("triton")


@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_any_length_find_their_kernels_compiled(model: str) -> None:
    """Triton specialises on whole numbers that are 1 or multiples of 16, unless a kernel says not to."""
    assert late_kernels(model) == {}
