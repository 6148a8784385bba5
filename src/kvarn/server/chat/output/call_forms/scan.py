"""Read tool calls in one form: everything between its first marker and its last. Knows no stream."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvarn.server.chat.output.call_forms.call_scan import WHITESPACE, CallScan, CallText, Status
from kvarn.server.chat.output.call_forms.cursor import WORD_CHARACTERS, Impossible, Reading, TextCursor
from kvarn.server.chat.output.call_forms.form import CallForm, MaybeWord, PairForm, Piece, Word
from kvarn.server.chat.output.call_forms.literals import GEMMA, PYTHON, read_members
from kvarn.server.chat.output.call_forms.restore import coerced, restored
from kvarn.server.chat.output.json_repair import is_strict_object


class FormScan:
    """Feed the growing text; at is the first character not consumed."""

    def __init__(
        self, form: CallForm, names: Collection[str], at: int, *, schemas: Mapping[str, Any], is_trusted: bool
    ) -> None:
        """at: where the text after the marker begins. is_trusted: a grammar wrote the calls."""
        self.status = Status.OPEN
        self.calls: list[CallText] = []
        self.json: CallScan | None = None  # the JSON being read
        self.body_at: int | None = None  # where the arguments began that are being read, if they are not JSON
        self._form = form
        self._names = names
        self._schemas = schemas
        self._is_trusted = is_trusted
        self._is_in_call = False  # between the name and the end of the arguments
        self._cursor = TextCursor(at)
        self._reading = self._read()

    @property
    def at(self) -> int:
        """The first character not consumed."""
        return self._cursor.at

    @property
    def is_whole(self) -> bool:
        """Whether nothing but closing markers is missing."""
        is_read = self.json is None or self.json.status is Status.DONE
        return bool(self.calls) and is_read and not self._is_in_call and self.status is not Status.FAILED

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is not whole, or there is none."""
        return self._is_in_call or not self.calls or not self.calls[-1].has_whole_arguments

    def feed(self, text: str) -> None:
        """Go on reading text, of which everything before `at` is known."""
        if self.status is not Status.OPEN:
            return
        self._cursor.text = text
        try:
            next(self._reading)
        except StopIteration:
            self.status = Status.DONE
        except Impossible:
            self.status = Status.FAILED

    def _read(self) -> Reading[None]:
        form = self._form
        if form.body == "json":
            yield from self._json_calls()
        elif form.takes_json and (yield from self._next_character()) in "[{":
            yield from self._json_value(None)
        else:
            yield from self._named_calls()

    def _next_character(self) -> Reading[str]:
        yield from self._cursor.space()
        return (yield from self._cursor.peek())

    def _json_calls(self) -> Reading[None]:
        yield from self._cursor.space()
        yield from self._json_value(None)
        if not self._form.end:
            return
        while self._form.holds_many and (yield from self._next_character()) in "[{":
            yield from self._json_value(None)
        yield from self._literals(self._form.end)

    def _json_value(self, name: str | None) -> Reading[None]:
        """Calls in JSON, or the arguments of one."""
        cursor = self._cursor
        self.json = CallScan(self._names, cursor.at, self.calls, name=name, is_trusted=self._is_trusted)
        while True:
            self.json.feed(cursor.text)
            cursor.at = self.json.at
            if self.json.status is Status.FAILED:
                raise Impossible
            if self.json.status is Status.DONE:
                return
            yield

    def _named_calls(self) -> Reading[None]:
        form = self._form
        yield from self._pieces(form.head if form.begin else form.head[1:])  # the marker was read
        while True:
            yield from self._named_call()
            if not (form.holds_many and form.end):
                break
            if not (yield from self._has_more()):
                yield from self._literals(form.end[1:])
                return
        if not self._is_closed_by_end:
            yield from self._literals(form.end)

    @property
    def _is_closed_by_end(self) -> bool:
        """Whether the marker that closes the arguments is the one that closes all."""
        return self._form.body == "pairs" and not self._form.tail

    def _has_more(self) -> Reading[bool]:
        """Read what stands between two calls; False: it is the first of the closing markers."""
        form = self._form
        if not form.head and not form.join.strip():
            if (yield from self._next_character()) in WORD_CHARACTERS:
                return True
            yield from self._cursor.literal(form.end[0])
            return False
        begin = form.join.strip() or form.head[0]
        assert isinstance(begin, str)
        if (yield from self._cursor.one_of((begin, form.end[0]))) == 1:
            return False
        yield from self._pieces(form.head if form.join.strip() else form.head[1:])
        return True

    def _named_call(self) -> Reading[None]:
        form = self._form
        yield from self._cursor.space()
        self._is_in_call, self.body_at = True, None
        name = yield from self._name()
        yield from self._pieces(form.after_name)
        if form.body == "object":
            yield from self._cursor.space()
            self.body_at = self._cursor.at
            yield from self._json_value(name)
            self._is_in_call = False
            yield from self._literals(form.tail)
            return
        self.body_at = self._cursor.at
        self.json = None
        call = CallText(name, converted="")
        self.calls.append(call)
        if form.pairs is not None:
            yield from self._pairs(form.pairs, call)
        else:
            members = yield from read_members(self._cursor, PYTHON if form.body == "python" else GEMMA, form.tail[0])
            schema = self._schemas.get(name, True)
            self._finish(call, _json({key: coerced(value, schema, key) for key, value in members.items()}))
        yield from self._literals(form.tail[1:])

    def _name(self) -> Reading[str]:
        """The name of a tool; fails at the first character that begins none."""
        cursor, name = self._cursor, ""
        while (character := (yield from cursor.peek())) in WORD_CHARACTERS:
            name += character
            if not any(known.startswith(name) for known in self._names):
                raise Impossible
            cursor.at += 1
        if name not in self._names:
            raise Impossible
        return name

    def _pairs(self, form: PairForm, call: CallText) -> Reading[None]:
        cursor, schema = self._cursor, self._schemas.get(call.name or "", True)
        closing = (self._form.tail or self._form.end)[0]
        keys: set[str] = set()
        call.converted = "{"
        while (yield from cursor.one_of((form.open, closing))) == 0:
            key, is_string = yield from self._key(form)
            if not key or (key in keys and not self._is_trusted):
                raise Impossible
            text, is_quoted = yield from self._value_text(form)
            if key in keys:
                continue
            value = restored(text, schema, key, True if is_quoted else is_string)
            call.converted += f"{', ' if keys else ''}{_json(key)}: {_json(value)}"
            keys.add(key)
        self._finish(call, call.converted + "}")

    def _key(self, form: PairForm) -> Reading[tuple[str, bool | None]]:
        first = form.key_closes[0][0][:1]
        key = yield from self._cursor.run(lambda character: character not in first + "\n")
        which = yield from self._cursor.one_of([text for text, _ in form.key_closes])
        if form.value_open:
            yield from self._cursor.literal(form.value_open)
        return key.strip(), form.key_closes[which][1]

    def _value_text(self, form: PairForm) -> Reading[tuple[str, bool]]:
        """The text of a value, and whether it stood between quotes."""
        close = form.close.strip(WHITESPACE)
        text = yield from self._cursor.until(close)
        if form.quotes is not None and text.startswith(form.quotes[0]):
            while not text.endswith(form.quotes[1]):  # what closes it may stand inside
                text += close + (yield from self._cursor.until(close))
            return text.removeprefix(form.quotes[0]).removesuffix(form.quotes[1]), True
        return text.removeprefix(form.pad).removesuffix(form.pad), False

    def _finish(self, call: CallText, arguments: str) -> None:
        if not self._is_trusted and not is_strict_object(arguments):
            raise Impossible
        call.converted, self._is_in_call = arguments, False

    def _pieces(self, pieces: Iterable[Piece]) -> Reading[None]:
        cursor = self._cursor
        for piece in pieces:
            match piece:
                case str():
                    if piece.strip(WHITESPACE):
                        yield from cursor.literal(piece)
                case Word():
                    yield from cursor.run(WORD_CHARACTERS.__contains__)
                case MaybeWord(marker):
                    yield from self._maybe_word(marker)

    def _maybe_word(self, marker: str) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.space()
        for offset in range(1, len(marker) + 1):
            while len(cursor.text) < cursor.at + offset:
                yield
            if not cursor.text.startswith(marker[:offset], cursor.at):
                return
        cursor.at += len(marker)
        yield from cursor.run(WORD_CHARACTERS.__contains__)

    def _literals(self, words: Iterable[str]) -> Reading[None]:
        for word in words:
            yield from self._cursor.literal(word)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
