"""nextn: lossless tree speculation for DeepSeek-V3-family models.

`LLM` and `SamplingParams` are loaded on first use, so that `import nextn` alone stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nextn.engine.llm import LLM
    from nextn.engine.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nextn.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nextn.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'nextn' has no attribute {name!r}")
