"""The grammar of the arguments of one tool in a form that is not JSON: pairs in XML, or literals.

Members come in the order of the schema. Strings of pairs are any text; of literals, what lies deeper than the items of
a list is any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvarn.server.chat.output.call_forms.form import GEMMA_QUOTE, PairForm
from kvarn.server.chat.output.call_forms.lark import json_value, marked, quoted, text_until
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.schema_fit import fits

MAX_FREE_MEMBERS = 16  # of arguments whose names the schema does not tell
_SHARED = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class ArgumentsGrammar:
    """Rules of the arguments of one tool; `name` is the rule for all of them."""

    format: OutputFormat
    name: str
    schema: Mapping[str, Any]
    guidance: Mapping[str, Any]
    is_flexible: bool = False  # any white space may stand between pairs

    def rules(self) -> list[str]:
        """All rules; those of `literal_rules` are shared by all tools."""
        form = self.format.form
        if form.pairs is not None:
            return self._pair_rules(form.pairs)
        if form.body in ("python", "gemma"):
            return self._literal_rules()
        return [f"{self.name}: {json_value(self.schema, self.guidance)}"]

    def _properties(self) -> Mapping[str, Any]:
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _is_required(self, key: str) -> bool:
        return key in (self.schema.get("required") or ())

    @property
    def _is_free(self) -> bool:
        """Whether arguments may have names that the schema does not tell."""
        others = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
        is_open = self.schema.get("additionalProperties", True) is not False
        return not self._properties() and (is_open or any(key in self.schema for key in others))

    def _pair_rules(self, form: PairForm) -> list[str]:
        if self._is_free:
            rule, value = text_until(self.format, f"{self.name}_text", form.pad + form.close.strip())
            around = self._around(form, form.key_closes[0][0])
            first = form.key_closes[0][0][:1]
            free = f'{around[0]} /[^{first}"<>\\n]+/ {around[1]} {value} {self._space(form.close)}'
            return [f"{self.name}: ({free}){{0,{MAX_FREE_MEMBERS}}}", rule]
        rules, members = [], []
        for index, (key, schema) in enumerate(self._properties().items()):
            name = f"{self.name}_{index}"
            members.append(name if self._is_required(key) else f"{name}?")
            rules += self._pair(form, name, key, schema)
        return [f"{self.name}: {' '.join(members) or quoted('')}", *rules]

    def _pair(self, form: PairForm, name: str, key: str, schema: object) -> list[str]:
        is_text = may_be_text(schema, self.schema)
        opening, closing = form.quotes or ("", "") if is_text else ("", "")
        end = closing + form.pad + form.close.strip()
        before, after = self._around(form, _key_close(form, schema, is_text=is_text))
        head = f"{before} {quoted(key)} {after} {quoted(opening)}"
        choices = _choices(schema) if is_text else None
        if choices:
            value = f"({' | '.join(quoted(one) for one in choices)}) {marked(self.format, end)}"
            return [f"{name}: {head} {value} {self._space(form.close)}"]
        if is_text:
            rule, value = text_until(self.format, f"{name}_text", end)
            return [f"{name}: {head} {value} {self._space(form.close)}", rule]
        assert isinstance(schema, Mapping)
        shared = {key: self.schema[key] for key in _SHARED if key in self.schema}
        value = json_value({**shared, **schema}, self.guidance)
        rest = f"{marked(self.format, end)} {self._space(form.close)}"
        return [f"{name}: {head} {name}_json {rest}", f"{name}_json: {value}"]

    def _around(self, form: PairForm, key_close: str) -> tuple[str, str]:
        """What stands before the key, and between it and the value."""
        space = "SPACE " if self.is_flexible else ""
        parts = [marked(self.format, key_close.strip()), self._space(key_close), marked(self.format, form.value_open)]
        return space + marked(self.format, form.open), " ".join([*parts, quoted(form.pad)])

    def _space(self, text: str) -> str:
        """The white space after a text."""
        return "SPACE" if self.is_flexible else quoted(text[len(text.rstrip()) :])

    def _literal_rules(self) -> list[str]:
        body = self.format.form.body
        words, separator = _WORDS[body], "=" if body == "python" else ":"
        join = quoted(words.join)
        if self._is_free:
            member = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {quoted(separator)} literal"
            return [f"{self.name}: ({member} ({join} {member}){{0,{MAX_FREE_MEMBERS - 1}}})?"]
        members = [
            (f"{quoted(key + separator)} ({_literal(schema, words)})", self._is_required(key))
            for key, schema in self._properties().items()
        ]
        return _in_order(self.name, members, join)


def may_be_text(schema: object, root: object) -> bool:
    """Whether an argument may be a string."""
    if not isinstance(schema, Mapping):
        return True
    if "type" in schema:
        return "string" in ([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    if "enum" in schema:
        return any(isinstance(one, str) for one in schema["enum"])
    return fits(schema, "x", root=root)


def literal_rules(format: OutputFormat) -> list[str]:
    """The rules of any literal."""
    number = r"NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/"
    shared = [number, r"INTEGER: /-?(0|[1-9][0-9]{0,15})/"]
    if format.form.body == "python":
        escape = r"\\['\"\\nrt]"
        return [
            *shared,
            rf"STRING: /'([^'\\\n]|{escape})*'|\"([^\"\\\n]|{escape})*\"/",
            'literal: STRING | NUMBER | "True" | "False" | "None" | list | object',
            'list: "[" (literal (", " literal)*)? "]"',
            'object: "{" (STRING ": " literal (", " STRING ": " literal)*)? "}"',
        ]
    rule, value = text_until(format, "gemma_text", GEMMA_QUOTE)
    return [
        *shared,
        rule,
        f"string: {marked(format, GEMMA_QUOTE)} {value}",
        'literal: string | NUMBER | "true" | "false" | "null" | list | object',
        'list: "[" (literal ("," literal)*)? "]"',
        'object: "{" (MEMBER_KEY ":" literal ("," MEMBER_KEY ":" literal)*)? "}"',
        "MEMBER_KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    ]


def _in_order(name: str, members: list[tuple[str, bool]], join: str) -> list[str]:
    """Members in this order, with what joins them; those that are not required may be missing."""
    rules = [f"{name}: {name}_0_first", f"{name}_{len(members)}_first: {quoted('')}"]
    rules.append(f"{name}_{len(members)}_more: {quoted('')}")
    for index, (member, is_required) in enumerate(members):
        here, after = f"{name}_{index}", f"{name}_{index + 1}"
        rest = "" if is_required else f" | {after}_first"
        rules.append(f"{here}_first: {member} {after}_more{rest}")
        rules.append(f"{here}_more: ({join} {member}){'' if is_required else '?'} {after}_more")
    return rules


@dataclass(frozen=True, slots=True)
class _LiteralWords:
    """How one style writes literals."""

    string: str  # the rule of any text
    true: str
    false: str
    join: str
    has_choices: bool  # a choice of texts can be written as one


_WORDS = {
    "python": _LiteralWords("STRING", "True", "False", ", ", has_choices=True),
    "gemma": _LiteralWords("string", "true", "false", ",", has_choices=False),
}


def _literal(schema: object, words: _LiteralWords, depth: int = 0) -> str:
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    choices = _choices(schema)
    if wanted == "string" and choices and words.has_choices:
        return " | ".join(quoted(repr(one)) for one in choices)
    if wanted == "array" and depth == 0 and isinstance(schema, Mapping) and isinstance(schema.get("items"), Mapping):
        item = _literal(schema["items"], words, depth + 1)
        return f'"[" (({item}) ({quoted(words.join)} ({item}))*)? "]"'
    simple = {
        "string": words.string,
        "integer": "INTEGER",
        "number": "NUMBER",
        "boolean": f"{quoted(words.true)} | {quoted(words.false)}",
        "array": "list",
        "object": "object",
    }
    return simple.get(wanted, "literal") if isinstance(wanted, str) else "literal"


def _choices(schema: object) -> list[str] | None:
    """The strings that may be chosen from, where nothing else may stand."""
    chosen = schema.get("enum") if isinstance(schema, Mapping) else None
    return chosen if isinstance(chosen, list) and chosen and all(isinstance(one, str) for one in chosen) else None


def _key_close(form: PairForm, schema: object, *, is_text: bool) -> str:
    """What closes a key, where it tells the type of the value."""
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    name = "number" if wanted == "integer" else wanted
    fitting = [text for text, is_string in form.key_closes if is_string in (None, is_text)]
    return next((text for text in fitting if f'"{name}"' in text), fitting[0])
