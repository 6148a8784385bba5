"""Every exception Kvarn raises on purpose.

    KvarnError
    ├── ConfigError          names the option and the accepted values
    ├── ModelError           anything wrong with a model or its files
    │   ├── ModelNotFound    no such path, alias, package or repository
    │   ├── FormatError      the bytes on disk are not what they claim (file, offset)
    │   ├── UnsupportedModel well-formed, but no backend here can run it (fields)
    │   ├── DownloadError    network, checksum, disk: nothing half-written is left behind
    │   └── DoesNotFit       the memory plan exceeds what the machine has
    ├── RequestError         the caller's request cannot be served as asked
    │   ├── InvalidParameter a sampling value, message or prompt out of range (field)
    │   ├── PromptTooLong    carries num_tokens and limit
    │   ├── TemplateError    the model's chat template is missing, failed or was stopped
    │   ├── ConstraintError  a schema, pattern or grammar cannot be used, or led to a dead end
    │   ├── Cancelled
    │   └── DeadlineExceeded
    ├── RetrievalError       a collection cannot do what is asked
    │   ├── CollectionNotFound
    │   ├── DocumentError    a document cannot be read; carries source
    │   ├── StorageQuotaExceeded  a key's collections would hold more than its tier allows
    │   └── StorageError     disk full, read-only, damaged, in use
    ├── AuthError            no key, a wrong one, or one that may not do this (reason)
    ├── CapacityError        queue full; carries retry_after_s
    │   ├── RateLimited      more than the tier of a key allows now; carries headers
    │   ├── HelperUnavailable  a helper process was killed or stopped, and so was the next
    │   └── LimitsUnavailable  what a key has taken cannot be counted now
    └── BackendError         the batch failed; the engine keeps serving
        ├── BrokenScores     the model's scores are not numbers
        └── AnswerError      one answer's tokens, text or constraint failed; the others go on

A message says what happened, with which value, and what to do about it. It is short whatever the value is: of one
that is longer the middle is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

MAX_MESSAGE = 800  # characters; of a longer message the first ...
MAX_NAME, MAX_FIELDS = 200, 100  # of UnsupportedModel.fields
MESSAGE_END = 200  # ... and so many of the last are told, where the advice is


def shortened(text: str, limit: int = MAX_MESSAGE, end: int = MESSAGE_END) -> str:
    """A text of at most limit characters, with what was left out of the middle counted."""
    if len(text) <= limit:
        return text
    mark = f" ... {len(text) - limit:,} characters more ... "
    return text[: limit - end - len(mark)] + mark + text[len(text) - end :]


class KvarnError(Exception):
    """Base of everything Kvarn raises on purpose."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(KvarnError):
    """An option has a value we cannot use."""


class ModelError(KvarnError):
    """Something is wrong with a model or its files."""


class ModelNotFound(ModelError):
    """No such path, alias, package or repository."""

    field = "model"  # of a request, as in RequestError


class FormatError(ModelError):
    """The bytes of a model file are not what they claim to be."""

    def __init__(self, message: str, *, file: str | None = None, offset: int | None = None) -> None:
        where = "" if file is None else f"{file}: " if offset is None else f"{file} at byte {offset:,}: "
        super().__init__(where + message)
        self.file = file
        self.offset = offset


class UnsupportedModel(ModelError):
    """The file is well-formed, but this build cannot run it; or the model cannot do what a request asks for."""

    field = "model"

    def __init__(self, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = tuple(shortened(name, MAX_NAME, MAX_NAME // 4) for name in fields[:MAX_FIELDS])


class DownloadError(ModelError):
    """A model could not be fetched; nothing half-written is left behind."""


class DoesNotFit(ModelError):
    """The memory plan exceeds what the machine has."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class RequestError(KvarnError):
    """The caller's request cannot be served as asked; field is the name of the parameter at fault, where it is one."""

    field: str | None = None


class InvalidParameter(RequestError):
    """A sampling value, message or prompt is out of range."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(RequestError):
    """The prompt leaves no room in the context."""

    field = "prompt"

    def __init__(self, num_tokens: int, limit: int, *, is_exact: bool = True) -> None:
        """is_exact: all tokens were counted, else only so many."""
        number = f"{num_tokens:,}" if is_exact else f"more than {num_tokens:,}"
        super().__init__(
            f"prompt has {number} tokens, the context allows {limit:,}; shorten it or set a larger context"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class TemplateError(RequestError):
    """The model's chat template is missing, failed or was stopped."""

    field = "messages"


class ConstraintError(RequestError):
    """A schema, pattern or grammar cannot be used, or the answer came to a point where nothing it allows may follow."""

    field = "constraint"


class Cancelled(RequestError):
    """The caller cancelled the request."""


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""


class RetrievalError(KvarnError):
    """A collection cannot do what is asked."""


class CollectionNotFound(RetrievalError):
    """No collection has this name."""


class DocumentError(RetrievalError):
    """A document cannot be read."""

    field = "documents"

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(f"{source}: {message}")
        self.source = source


class StorageQuotaExceeded(RetrievalError):
    """The collections of a key would hold more bytes than its tier allows."""


class StorageError(RetrievalError):
    """The files of a collection cannot be read or written."""


class CollectionLocked(StorageError):
    """Another process is changing the collection."""


class AuthError(KvarnError):
    """The caller may not do this; a "forbidden" key is a valid one, but its tier does not allow it."""

    def __init__(self, message: str, *, reason: Literal["missing", "invalid", "forbidden"]) -> None:
        super().__init__(message)
        self.reason = reason


class CapacityError(KvarnError):
    """No room for the request now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    """More than the tier of a key allows now; headers say what is left of each limit."""

    def __init__(
        self, message: str, *, retry_after_s: float, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason  # "requests", "tokens" or "concurrency"
        self.headers = dict(headers or {})


class HelperUnavailable(CapacityError):
    """A helper process was killed or stopped from outside; what it was to do may be tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=1.0)


class LimitsUnavailable(CapacityError):
    """What a key has taken is counted elsewhere, and cannot be counted now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=2.0)


class BackendError(KvarnError):
    """The batch failed; the engine keeps serving."""


class DeviceLost(BackendError):
    """The device computes nothing any more, for anybody: the engine ends."""


class BrokenScores(BackendError):
    """The model's scores are not numbers."""


class AnswerError(BackendError):
    """One answer could not be followed: its tokens, their text, its stop strings or its constraint failed."""
