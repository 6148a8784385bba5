"""Checks of single values that a caller gave, with the message every refusal has: name, value, what to give.

One Checker for each form of message: check_parameter for the values of a call, check_setting for those of a
configuration. A module whose messages differ in a detail derives its own with dataclasses.replace.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kvarn.errors import ConfigError, InvalidParameter, KvarnError


def short(value: object) -> str:
    """A value as a message shows it: 60 characters, the last three of a long one are dots."""
    text = _repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def cut(value: object) -> str:
    """A value as a message shows it: its first 60 characters."""
    return _repr(value)[:60]


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # nested too deeply, an integer of more than 4,300 digits, or a class with a fault of its own
        return f"a {type(value).__name__} that cannot be shown"


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it has items in an order; an array without dimensions says so and has none."""
    is_listed = isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping | Set | type)
    return is_listed and getattr(value, "ndim", 1) != 0


def why_unreadable(path: Path, error: OSError | ValueError) -> str:
    """Why a file of the operator's cannot be read; where that is forbidden, with the user and the file's owner."""
    if not isinstance(error, PermissionError):
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    try:
        found = path.stat()
        owned = f"it belongs to {path.owner()}:{path.group()}, mode {stat.S_IMODE(found.st_mode):03o}"
    except (OSError, KeyError):
        owned = "its folder may not be entered"
    return f"{error.strerror}: {owned}, and this process runs as {_user()}; let it read the file (chgrp, chmod 640)"


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):
        return f"user {os.geteuid()}"


def utf8(name: str, text: str) -> bytes:
    """The bytes of a text that a caller gave; half of a surrogate pair is refused by the name of the parameter."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{name} has a lone surrogate at character {error.start}; give valid Unicode"
        raise InvalidParameter(message, field=name) from None


@dataclass(frozen=True, slots=True)
class Checker:
    """Refuses values out of range with one class of error; every method returns quietly where a value is fine."""

    error: Callable[[str, str], KvarnError]  # of a message and the name of the value
    show: Callable[[object], str]  # the refused value
    integer_format: str = ""  # of limits
    number_format: str = "g"
    booleans: str = "True or False"
    quotes_choices: bool = False
    hint: str = ""  # after the range: what else is accepted

    def number(self, name: str, value: object, low: float, high: float, *, optional: bool = False) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN is refused
            limits = f"{low:{self.number_format}} to {high:{self.number_format}}"
            raise self._refusal(name, value, f"give a number from {limits}{self.hint}")

    def integer(self, name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            limits = f"{low:{self.integer_format}} to {high:{self.integer_format}}"
            raise self._refusal(name, value, f"give a whole number from {limits}{self.hint}")

    def flag(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise self._refusal(name, value, f"give {self.booleans}")

    def one_of(self, name: str, value: object, accepted: Sequence[str], *, optional: bool = False) -> None:
        if value is None and optional:
            return
        if not isinstance(value, str) or value not in accepted:
            shown = ", ".join(map(repr, accepted) if self.quotes_choices else accepted)
            raise self._refusal(name, value, f"choose one of {shown}")

    def instance(
        self, name: str, value: object, kinds: type | tuple[type, ...], what: str, *, optional: bool = False
    ) -> None:
        """what: to give, in words."""
        if not isinstance(value, kinds) and not (value is None and optional):
            raise self._refusal(name, value, f"give {what}")

    def function(self, name: str, value: object) -> None:
        """None is fine: there is no such function."""
        if value is not None and not callable(value):
            raise self._refusal(name, value, "give a function, or None")

    def path(self, name: str, value: object, what: str = "a path") -> str:
        """A path or a name as text."""
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if isinstance(text, str) and "\0" not in text and text.encode(errors="replace") == text.encode(errors="ignore"):
            return text
        raise self._refusal(name, value, f"give {what}")

    def _refusal(self, name: str, value: object, advice: str) -> KvarnError:
        return self.error(f"{name} is {self.show(value)}; {advice}", name)


def _invalid_parameter(message: str, name: str) -> InvalidParameter:
    return InvalidParameter(message, field=name)


def _config_error(message: str, _: str) -> ConfigError:
    return ConfigError(message)


check_parameter = Checker(_invalid_parameter, short)
check_setting = Checker(_config_error, cut, integer_format=",")
