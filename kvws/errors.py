"""Every error that kvws raises on purpose.

KvwsError                      something kvws can explain; carries a hint and an HTTP status
├── ConfigError                a setting is missing, unknown or contradicts another one
│   └── ProfileError           a retrieval profile is broken, or of another model
├── TraceError                 a recorded session cannot be read
├── ModelError                 a model folder is missing or broken
│   └── UnsupportedModel       its attention or position encoding cannot be relocated
├── EngineError                the engine did not do what was asked
│   ├── EngineStartError       it did not come up
│   ├── SelfCheckFailed        it came up, but the plugin's numbers are missing or wrong
│   ├── EngineDied             its process is gone
│   ├── LoadFailed             a promised view could not be filled; retry without the lost block
│   ├── PoisonedView           the engine recomputed promised pages; the namespace must change
│   └── ControlError           the data plane refused a control message
├── BadRequest                 a request cannot be read
│   ├── NotAuthorised          it carries no key, or a wrong one
│   ├── HostRefused            it was sent to a name that is not served here
│   ├── BodyTooLarge           it is larger than this server reads
│   └── NoSuchRoute            there is nothing at that path
├── PromptError                a prompt cannot be answered
│   └── PromptTooLong          it does not fit the virtual window
├── TooManyRequests            a client asks more than its share at once
├── Overloaded                 the server has no room for another request now
├── HostTierFull               the host tier has no room for another block
└── StoreError                 the durable store cannot be used
    ├── StoreInUse             another process owns the directory
    ├── UnsafeStore            the directory is a symlink, or others can write to it
    ├── StoreFormatError       a file is not ours, or of a newer format version
    ├── OtherModel             a workspace was written with another model or layout
    ├── CorruptBlock           a block's bytes on disk are not what was written
    └── DiskTierFull           the disk tier's budget holds no further block
"""

from __future__ import annotations

from collections.abc import Sequence


class KvwsError(Exception):
    """An expected failure: what went wrong, and what to do about it.

    Attributes:
        hint: one sentence that says what the user can do, or "" when nothing can be done.
        http_status: the status an HTTP front answers with.
    """

    http_status: int = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(KvwsError):
    """A setting is missing, unknown or contradicts another one."""

    http_status = 400


class ProfileError(ConfigError):
    """A retrieval profile cannot be read, contradicts itself, or is of another model."""


class TraceError(KvwsError):
    """A recorded session cannot be read."""

    http_status = 400


class ModelError(KvwsError):
    """A model folder is missing or broken."""


class UnsupportedModel(ModelError):
    """The model's attention or position encoding cannot be relocated block by block."""


class EngineError(KvwsError):
    """The engine did not do what was asked."""

    http_status = 503


class EngineStartError(EngineError):
    """The engine did not come up."""


class SelfCheckFailed(EngineError):
    """The engine came up, but the plugin's numbers are missing or wrong."""


class EngineDied(EngineError):
    """The engine's process is gone."""


class LoadFailed(EngineError):
    """A promised view could not be filled; the step can be retried without the lost block."""


class PoisonedView(EngineError):
    """The engine recomputed promised pages as text, so their hashes now name other KV."""


class ControlError(EngineError):
    """The data plane refused a control message."""


class PromptError(KvwsError):
    """A prompt cannot be answered."""

    http_status = 400


class PromptTooLong(PromptError):
    """A prompt does not fit the virtual window.

    Attributes:
        prompt_tokens: of the prompt.
        window_tokens: of the window.
    """

    def __init__(self, prompt_tokens: int, window_tokens: int) -> None:
        super().__init__(
            f"prompt is too long: {prompt_tokens} tokens > {window_tokens} maximum",
            hint="start a new session, let the client compact its history, or raise --window",
        )
        self.prompt_tokens = prompt_tokens
        self.window_tokens = window_tokens


class BadRequest(KvwsError):
    """A request cannot be read."""

    http_status = 400


class NotAuthorised(BadRequest):
    """A request carries no API key, or a wrong one."""

    http_status = 401


class HostRefused(BadRequest):
    """A request was sent to a host name that is not served here."""

    http_status = 403


class BodyTooLarge(BadRequest):
    """A request body is larger than this server reads."""

    http_status = 413


class NoSuchRoute(BadRequest):
    """There is nothing at that path."""

    http_status = 404


class TooManyRequests(KvwsError):
    """A client asks for more answers at once than its share.

    Attributes:
        retry_after_s: when to try again.
    """

    http_status = 429

    def __init__(self, message: str, *, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Overloaded(KvwsError):
    """The server has no room for another request now.

    Attributes:
        retry_after_s: when to try again.
    """

    http_status = 503

    def __init__(self, message: str, *, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class HostTierFull(KvwsError):
    """The host tier has no room for another block."""

    http_status = 503


class StoreError(KvwsError):
    """The durable store cannot be used."""

    http_status = 503


class StoreInUse(StoreError):
    """Another process owns the store directory."""


class UnsafeStore(StoreError):
    """The store directory is a symbolic link, or others can write to it."""


class StoreFormatError(StoreError):
    """A file in the store is not ours, or of a newer format version; it was left as it is."""


class OtherModel(StoreError):
    """A workspace was written with another model or layout; it was left as it is."""

    http_status = 409


class CorruptBlock(StoreError):
    """Bytes of blocks on disk are not what was written; their tokens must be computed again.

    Attributes:
        numbers: the blocks.
    """

    def __init__(self, numbers: Sequence[int], message: str) -> None:
        super().__init__(message, hint="its tokens are computed again when they are needed")
        self.numbers = tuple(numbers)


class DiskTierFull(StoreError):
    """The disk tier's budget holds no further block."""

    http_status = 507
