"""The profile function behind benchmarks/request_path.py: sees every call on every thread, keeps the way of a request.

Knows the package's folder and four names: data_received, Engine.step, and forward and sample of one object. Everything
else is told by what a value holds, so a tree with other modules and classes is measured in the same way.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any

STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Standard functions that give work to another thread, task or process, written in Python and in C.
HANDOVERS = {"create_task", "run_in_executor", "call_soon_threadsafe", "set_result"}
NATIVE_HANDOVERS = {"Future.set_result", "write", "send", "sendall", "socket.send", "socket.sendall"}
BACKEND_CALLS = {"forward", "sample"}
CONTENT = re.compile(rb'"content":"[^"]')  # a chunk with text
MAX_DEPTH = 3  # containers in containers: a list of messages, each a dict


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and what is known of it before: by these values it is recognised on its way."""

    marker: str  # a word of the question
    prompt_ids: list[int]
    token_id: int  # the first one of the answer


@dataclass(slots=True)
class Recorder:
    """Idle until a question is given; then its way is recorded, once."""

    package: str  # folder of the sources, with a separator at its end
    question: Question | None = None
    on_step: Callable[[], None] = lambda: None  # called whenever Engine.step begins
    entered: dict[CodeType, None] = field(default_factory=dict)
    from_elsewhere: set[CodeType] = field(default_factory=set)  # entered from another file
    on_path: dict[CodeType, None] = field(default_factory=dict)  # on the stack at a moment that counts
    token_forms: dict[str, None] = field(default_factory=dict)
    _carriers: dict[int, Any] = field(default_factory=dict)  # kept, so that no id is used twice
    _is_open: bool = False  # between data_received and the first token's bytes
    _is_over: bool = False
    _planner: int | None = None  # the thread in Engine.step, until the token is chosen
    _has_sampled: bool = False

    def install(self) -> None:
        """Begin to see this thread and those it starts from now on."""
        threading.setprofile(self.hook)
        sys.setprofile(self.hook)

    def hook(self, frame: FrameType, event: str, value: Any) -> None:
        """Take one event of the interpreter."""
        if self.question is None:
            return
        if event == "call":
            self._called(frame)
        elif self._is_open and event == "return":
            self._returned(frame, value)
        elif self._is_open and event == "c_call" and _is_handover(value):
            self._keep_stack(frame)

    @property
    def hops(self) -> list[CodeType]:
        """Functions on the path that were entered from another file, in the order in which they were first seen."""
        return [code for code in self.entered if code in self.on_path and code in self.from_elsewhere]

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_qualname == "Engine.step":
            self.on_step()
        if not self._is_open:
            self._is_open = code.co_name == "data_received" and not self._is_over
        if not self._is_open:
            return
        if self._is_ours(code):
            self._entered(frame)
        elif code.co_filename.startswith(STANDARD_LIBRARY) and "site-packages" not in code.co_filename:
            self._left(frame)

    def _entered(self, frame: FrameType) -> None:
        code = frame.f_code
        self.entered.setdefault(code)
        if frame.f_back is None or frame.f_back.f_code.co_filename != code.co_filename:
            self.from_elsewhere.add(code)
        if code.co_qualname == "Engine.step":
            self._keep_stack(frame)
            self._planner = None if self._has_sampled else threading.get_ident()
        elif code.co_name in BACKEND_CALLS and all(hasattr(frame.f_locals.get("self"), one) for one in BACKEND_CALLS):
            self._keep_stack(frame)
            if code.co_name == "sample":
                self._has_sampled, self._planner = True, None

    def _left(self, frame: FrameType) -> None:
        """A function of the standard library was entered."""
        if frame.f_code.co_name in HANDOVERS:
            self._keep_stack(frame)
        elif frame.f_code.co_name == "write" and CONTENT.search(bytes(frame.f_locals.get("data", b""))):
            self._keep_stack(frame)
            self._is_open, self._is_over = False, True
            self._carriers.clear()

    def _returned(self, frame: FrameType, value: Any) -> None:
        """Look whether a form of the request or of its token was made: an object of ours, or the text of a chunk."""
        code = frame.f_code
        is_generated = code.co_filename == "<string>"  # the __init__ of a dataclass, the __new__ of a named tuple
        if not (is_generated or self._is_ours(code)) or threading.get_ident() == self._planner:
            return
        made = frame.f_locals.get("self") if code.co_name in ("__init__", "__post_init__") else value
        if isinstance(made, str | bytes):
            is_form = self._has_sampled and CONTENT.search(made.encode() if isinstance(made, str) else made) is not None
        else:
            is_form = is_ours(type(made)) and id(made) not in self._carriers and self._carries(made)
        if is_form:
            self._keep_stack(frame)
            self._carriers[id(made)] = made
            if self._has_sampled and self._carries(made, of_token=True):
                self.token_forms.setdefault(type(made).__name__)

    def _carries(self, made: Any, *, of_token: bool = False) -> bool:
        return any(self._is_part(one, MAX_DEPTH, of_token) for one in values_of(made))

    def _is_part(self, value: Any, depth: int, of_token: bool) -> bool:
        """Whether a value is the question, its token ids, the token, or something that was made of them."""
        assert self.question is not None
        if isinstance(value, str):
            return not of_token and self.question.marker in value
        if type(value) is int:
            return self._has_sampled and value == self.question.token_id
        if id(value) in self._carriers:
            return not of_token or type(value).__name__ in self.token_forms
        if type(value).__name__ == "ndarray":
            value = value.tolist() if value.size <= len(self.question.prompt_ids) else []
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, list | tuple) or not depth:
            return False
        if list(value) == self.question.prompt_ids:
            return not of_token
        return any(self._is_part(one, depth - 1, of_token) for one in value[:64])

    def _keep_stack(self, frame: FrameType | None) -> None:
        while frame is not None:
            code = frame.f_code
            if code in self.entered and not code.co_name.startswith("<"):
                self.on_path.setdefault(code)
            frame = frame.f_back

    def _is_ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self.package)


def is_ours(kind: type) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "kvarn"


def values_of(one: Any) -> Sequence[Any]:
    """The values an object holds, by attribute or by place."""
    return one if isinstance(one, tuple) else [value for _, value in attributes(one)]


def _is_handover(function: object) -> bool:
    """Whether a function written in C gives work to another thread or process; also those of a queue's subclass."""
    if isinstance(getattr(function, "__self__", None), SimpleQueue):
        return getattr(function, "__name__", "") == "put"
    return getattr(function, "__qualname__", "") in NATIVE_HANDOVERS


def attributes(one: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an instance, with slots or without; nothing of ours is called for it."""
    yield from list(getattr(one, "__dict__", {}).items())
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            try:
                yield name, descriptor.__get__(one)  # type: ignore[union-attr]
            except AttributeError:
                continue
