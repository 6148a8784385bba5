"""What a client and an engine in a process of its own tell each other: frozen messages, pickled, over one socket.

    client ──Start, then lists of Submit, Cancel, Call, Close──> engine host
    client <──lists of Progress, Ready, Accepted, Returned, Failed, StepDone, Alive── engine host

Both ends are the same program on one machine, and nobody else has the socket. Knows no model and no thread.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from kvarn.config import EngineConfig
from kvarn.engine.submission import Submission
from kvarn.errors import BackendError, KvarnError
from kvarn.models.memory_plan import MemoryPlan
from kvarn.structured.compiler import CompiledConstraint, ConstraintCompiler
from kvarn.types import TokenEvent

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, and how."""

    path: Path
    config: EngineConfig
    log_level: str | None  # None: this program has not configured its logs


@dataclass(frozen=True, slots=True)
class Submit:
    """Submissions that are accepted or refused together; one number for each names it from then on."""

    numbers: tuple[int, ...]
    readers: tuple[tuple[bool, bool], ...]  # of each: whether tokens are read as they come, and taken from the request
    submissions: bytes  # see pack_submissions
    has_constraints: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants what has this number any more: a submission or a call."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the engine; one that computes has the priority of its turn."""

    number: int
    function: bytes
    num_tokens: int = 0
    priority: int | None = None  # None: it computes nothing


@dataclass(frozen=True, slots=True)
class Close:
    """The last message."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of loading, in bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; what the client's side needs to know of it."""

    config: EngineConfig
    memory: MemoryPlan
    context: int
    num_blocks: int
    block_size: int
    backend: str
    isa: str


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """One answer that will be computed."""

    number: int  # of the engine's Request
    id: str
    choice: int
    seed: int
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """All submissions of a Submit were; the answers of each."""

    number: int  # the first of the Submit
    requests: tuple[tuple[AcceptedRequest, ...], ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """What came of a call, or why a Submit or the load was refused."""

    number: int
    result: Any = None
    error: PackedError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A submission that was accepted ends with an error."""

    number: int
    error: PackedError


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is that has no token yet, or has just got its first."""

    number: int
    started_at: float | None
    num_cached: int | None
    num_computed: int
    first_token_at: float | None
    num_first: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """All that a step gave. Tokens: two lists of equal length, a request's number and an id."""

    numbers: list[int]
    token_ids: list[int]
    progress: list[RequestProgress]
    events: list[tuple[int, TokenEvent]]  # with the number of the submission
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A step or a call that takes long has advanced."""


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception: many cannot be pickled, because they are made from other arguments than they keep."""

    kind: type[KvarnError]
    args: tuple[Any, ...]
    fields: dict[str, Any]
    cause: PackedError | None

    @staticmethod
    def of(error: BaseException) -> PackedError:
        """Errors of Kvarn as they are, others as a BackendError that names them."""
        cause = None if error.__cause__ is None else PackedError.of(error.__cause__)
        if isinstance(error, KvarnError):
            return PackedError(type(error), error.args, dict(error.__dict__), cause)
        return PackedError(BackendError, (f"{type(error).__name__}: {error}",), {}, cause)

    def error(self) -> KvarnError:
        """A new exception like the one that was packed."""
        error = self.kind.__new__(self.kind)
        error.args = self.args
        error.__dict__.update(self.fields)
        error.__cause__ = None if self.cause is None else self.cause.error()
        return error


def take_all(outbox: SimpleQueue[T]) -> list[T]:
    """Wait for a message; with it come all others that are there, as one write wakes the other side once."""
    taken = [outbox.get()]
    with suppress(Empty):
        while True:
            taken.append(outbox.get_nowait())
    return taken


def pack_submissions(submissions: list[Submission]) -> bytes:
    """Submissions as bytes; compiled constraints and the tokenizer as what the other side has of them."""
    if not any(one.has_constraints for one in submissions):  # the short way: looking for what is shared takes time
        return pickle.dumps(submissions, pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _SharedPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(submissions)
    return buffer.getvalue()


def unpack_submissions(data: bytes, tokenizer: Tokenizer, compiler: ConstraintCompiler) -> list[Submission]:
    """The other direction; constraints are compiled once more, which the other side has found to be safe."""
    found: list[Submission] = _SharedUnpickler(io.BytesIO(data), tokenizer, compiler).load()
    return found


class _SharedPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        from kvarn.tokenizer.tokenizer import Tokenizer

        if isinstance(obj, CompiledConstraint):
            return "constraint", obj.source
        return ("tokenizer", None) if isinstance(obj, Tokenizer) else None


class _SharedUnpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
        super().__init__(data)
        self._tokenizer = tokenizer
        self._compiler = compiler

    def persistent_load(self, pid: Any) -> Any:
        kind, source = pid
        return self._tokenizer if kind == "tokenizer" else self._compiler.compile_again(source)


def pack_function(function: Callable[..., Any]) -> bytes:
    """A function of a module, or a partial of one; BackendError for others."""
    try:
        return pickle.dumps(function, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise BackendError(
            f"{function!r} cannot be run in the engine's process: {error}; give a function of a module, or load the "
            "model with own_process=False"
        ) from error
