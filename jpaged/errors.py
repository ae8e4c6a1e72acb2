"""Errors that reach a user. Each names the field that was wrong and what was allowed.

Knows nothing of HTTP: the server maps these to status codes.
"""


class JpagedError(Exception):
    """Base of all errors raised on purpose by jpaged."""


class RequestError(JpagedError, ValueError):
    """A request is invalid; nothing was allocated for it and the engine goes on.

    `field` is the name of the parameter at fault (`None` when it is no single one); `code` a stable
    machine-readable word such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class QueueFullError(JpagedError, RuntimeError):
    """Too many requests wait already; this one was not queued, and may be sent again later."""


class ConfigError(JpagedError, ValueError):
    """An engine argument, or a combination of them, is invalid. `field` names the argument."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelLoadError(JpagedError):
    """A checkpoint cannot be found, read or understood."""


class EngineDeadError(JpagedError, RuntimeError):
    """The device step failed, or the engine was closed; no request can be served any more."""
