"""The embedded demo model: a small trained DeepSeek-V3-architecture checkpoint; see MODEL_CARD.md beside it."""

from pathlib import Path


def path() -> Path:
    """The checkpoint directory, as any other MODEL."""
    return Path(__file__).resolve().parent
