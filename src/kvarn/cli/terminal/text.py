"""Text in and out of a terminal. Nothing that a model or a file holds may control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from kvarn.errors import InvalidParameter

MAX_INPUT_BYTES = 64 << 20

# C0 and C1 control characters but tab and newline: escape sequences could rewrite what the user sees.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
# What breaks a line or turns its direction: U+202E makes "gpj.exe" of "exe.jpg".
_LINE_BREAKERS = [*map(ord, "\t\n"), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_IN_LINES = _CONTROLS | dict.fromkeys(_LINE_BREAKERS, "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    """Replace control characters, so that text from outside cannot control the terminal."""
    return text.translate(_CONTROLS)


def printable_name(name: str) -> str:
    """The same for the name of a file or a place, which may not look like a line of ours either."""
    return name.translate(_IN_LINES)


def read_prompt(argument: str) -> str:
    """The prompt itself, or all of stdin for `-`."""
    if argument != "-":
        return require_utf8(argument, "the prompt")
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise InvalidParameter(f"stdin has more than {MAX_INPUT_BYTES:,} bytes; give a shorter prompt", field="prompt")
    if not data:
        raise InvalidParameter(
            "stdin is empty; pipe a text into it, or give the prompt in the place of -", field="prompt"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"stdin is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}; convert it first",
            field="prompt",
        ) from None


def require_utf8(text: str, what: str) -> str:
    """Refuse text that came from bytes which are not UTF-8 (they arrive as lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"{what} is not valid UTF-8 at character {error.start:,}; convert it first", field="prompt"
        ) from None
    return text


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines, all columns but the last padded to the width of their longest cell."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])


def os_error_text(error: OSError) -> str:
    """What the operating system refused, to which file, and what to look at."""
    if error.strerror is None:
        return printable(" ".join(str(error).split()))
    where = f"{error.filename!r}: " if error.filename is not None else ""
    return printable(f"{where}{error.strerror}; check the path, its permissions and the free space")


class Writer:
    """Streams an answer to stdout, at once, and without control characters when that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._ends_line = True

    def write(self, text: str) -> None:
        if not text:
            return
        sys.stdout.write(printable(text) if self._is_terminal else text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n")

    def end_line(self) -> None:
        """Start a new line unless the answer has."""
        if not self._ends_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._ends_line = True
