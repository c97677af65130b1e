"""The errors that nextn raises on purpose; anything else that escapes is a defect.

NextnError
├── ConfigError       a flag or a config.json field has a value that cannot work
├── CheckpointError   a checkpoint is missing, incomplete, corrupt or of an unsupported kind
├── RequestError      one request asks for something that cannot be done; names the field
└── CapacityError     the machine has too little memory for the model, the cache or the request

Others add leaves to the tree: the engine `GrammarsBusy` (grammar.py), the server `ApiError` (protocol.py),
`Busy`, `Damaged` and `Unavailable` (bridge.py), and `StepTimeout` (watchdog.py).
"""

from __future__ import annotations


class NextnError(Exception):
    """Root of the tree; its text is one sentence for a person, saying what to do."""


class ConfigError(NextnError, ValueError):
    """A configuration value that cannot work; raised before anything is loaded."""


class CheckpointError(NextnError):
    """A checkpoint that cannot be loaded or written; the text names files and tensors."""


class RequestError(NextnError, ValueError):
    """A request that cannot be served as asked; `field` is the API field at fault, if there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(NextnError):
    """Not enough memory; the text gives the figures."""
