"""Text that may be tool calls: a marker, the JSON, and what closes it. It is decided as a whole.

Either all of it is calls, or it fails at one character and everything before that is content.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.formats.strict_json import parse_value
from kvarn.server.chat.output.call_forms.call_scan import CallText, Status
from kvarn.server.chat.output.call_forms.form import CallForm
from kvarn.server.chat.output.call_forms.scan import FormScan
from kvarn.server.chat.output.schema_fit import fits

Part = Literal["call", "rest", "arguments"]  # all after the {, all after the name, what stands after that
SEPARATOR = ";"  # between bare calls
FENCE = "```"


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call whose form is certain, and how much of it was written: what follows can be enforced."""

    part: Part  # what follows `at`
    name: str | None  # None: not known yet
    is_closed: bool  # the marker that closes the form must follow
    at: int  # in the whole text
    written: str  # since then


class Candidate:
    """One marker and what follows it; text grows, at is the first character not consumed."""

    def __init__(
        self, form: CallForm, marker: str, names: Collection[str], schemas: Mapping[str, Any], *, is_trusted: bool
    ) -> None:
        self.text = ""
        self.marker = marker
        self._is_marked = marker not in ("", SEPARATOR)
        self._form = form
        self._schemas = schemas
        self._scan = FormScan(form, names, len(marker), schemas=schemas, is_trusted=is_trusted)

    @property
    def at(self) -> int:
        """The first character not consumed."""
        return self._scan.at

    @property
    def status(self) -> Status:
        """Whether it is calls."""
        return self._scan.status

    @property
    def calls(self) -> list[CallText]:
        """The calls read so far, the last one perhaps in part."""
        return self._scan.calls

    @property
    def is_whole(self) -> bool:
        """Whether nothing but closing markers is missing."""
        return self._scan.is_whole

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is not whole."""
        return self._scan.has_open_call

    @property
    def num_certain(self) -> int | None:
        """Characters that are content if this fails, as those behind may be a call; None: all that was read."""
        if self._is_marked:
            return len(self.marker)
        return 1 if self.text.startswith("[") else None

    @property
    def fits(self) -> bool:
        """Whether the arguments of all calls follow the schemas of what they call."""
        arguments = ((self._schemas.get(call.name or "", True), call.arguments(self.text, 0)) for call in self.calls)
        return all(fits(schema, parse_value(text)) for schema, text in arguments)

    def begun(self, at: int) -> BegunCall | None:
        """The call that is being written, if it is certain to be one; at: of this candidate in the whole text."""
        found = self._begun_part()
        if found is None:
            return None
        part, start = found
        name = None if part == "call" else self.calls[-1].name
        is_list = self._scan.json is not None and self._scan.json.is_list
        is_closed = part == "call" and bool(self._form.end) and not is_list and not self._form.holds_many
        return BegunCall(part, name, is_closed, at + start, self.text[start:])

    def _begun_part(self) -> tuple[Part, int] | None:
        """What is being written, and where it began."""
        scan = self._scan
        if scan.status is not Status.OPEN or not scan.has_open_call or not scan.calls:
            return None
        call = scan.calls[-1]
        if scan.body_at is not None:
            return "arguments", scan.body_at
        if call.opened_at is not None and self._form.marker:
            return "call", call.opened_at
        if call.named_at is not None and (call.start is None or call.start > call.named_at):
            return "rest", call.named_at
        return None

    def feed(self, text: str) -> None:
        """Read on."""
        self.text += text
        self._scan.feed(self.text)
