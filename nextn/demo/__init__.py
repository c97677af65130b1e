"""The embedded demo model, a small trained DeepSeek-V3-architecture checkpoint; MODEL_CARD.md tells more."""

from pathlib import Path


def path() -> Path:
    """The checkpoint directory, as any other MODEL."""
    return Path(__file__).resolve().parent
