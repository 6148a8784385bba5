"""Group C of the hardening list: no schema, pattern or grammar takes the process down, or more than its share of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import CapacityError, ConstraintError
from kvarn.sampling.token_masks import allowed_tokens
from kvarn.structured.compiler import CompilerLimits, ConstraintCompiler
from kvarn.structured.constraints import MAX_CONSTRAINT_BYTES, Constraint, Grammar, JsonSchema, Regex
from kvarn.structured.grammar_sandbox import SandboxLimits
from tests.unit.structured.constrained import accepts, compiler, tokenizer

MAX_GROWTH_BYTES = 64 << 20
MAX_COMPILE_S = 2.0  # on a processor, in this process; the child has its own limit
MAX_MASK_S = 0.25
NUM_STEPS = 24


def nested_any_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": 3}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"allOf": [schema, {"type": "string"}]}]}
    return schema


def product_of_choices(count: int) -> dict[str, Any]:
    def one(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    return {"allOf": [{"anyOf": [one(f"a{i}"), one(f"b{i}")]} for i in range(count)]}


def chain(name: str, length: int) -> str:
    links = [f"{name}{i}: {name}{i + 1}" for i in range(length)]
    return "\n".join([f"start: {name}0", *links, f'{name}{length}: "z"'])


TREE = {"type": "array", "items": {"$ref": "#"}}


def references(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "null"}}}


REFUSED: dict[str, Constraint] = {
    "C1 2^16 combinations": JsonSchema(product_of_choices(16)),
    "C1 2^64 combinations": JsonSchema(product_of_choices(64)),
    "C2 a remote reference": JsonSchema({"$ref": "http://127.0.0.1:9/x.json"}),
    "C2 a reference to a file": JsonSchema({"$ref": "file:///etc/passwd"}),
    "C2 a chain of 3,000 references": JsonSchema(references(3000)),
    "C3 an enum of 20,000": JsonSchema({"enum": [f"s{i}" for i in range(20_000)]}),
    "C4 an empty class": Regex("[^]{1,10000}{1,10000}"),
    "C4 look-ahead": Regex("(?=a)b"),
    "C4 look-behind": Regex("(?<!a)b"),
    "C4 look-ahead in a schema": JsonSchema({"type": "string", "pattern": "^(?!a).*$"}),
    "C4 a back-reference": Regex(r"(a)\1"),
    "C4 an open group": Regex("(?:"),
    "C4 an open group in a schema": JsonSchema({"type": "string", "pattern": "("}),
    "C4 100,000 open groups": Regex("(" * 100_000),
    "C4 nothing in common": Regex("[a&&b]"),
    "C5 a chain of 9,000 rules": Grammar(chain("r", 9_000)),
    "C5 a chain of 9,000 terminals": Grammar(chain("R", 9_000)),
    "C5 100,000 brackets": Grammar("start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "C5 a name nobody defined": Grammar("start: nobody"),
    "C5 no grammar": Grammar("\x00\x01 %%%"),
    "C5 an empty grammar": Grammar(""),
    "C5 an import of a file": Grammar("%import /etc/passwd\nstart: A"),
    "C6 no such length": JsonSchema({"type": "string", "minLength": 5, "maxLength": 3}),
    "C6 no such number": JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}),
    "C6 no such list": JsonSchema({"type": "array", "minItems": 5, "maxItems": 3}),
    "C6 no such multiple": JsonSchema({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}),
    "C6 a property that cannot be": JsonSchema({"properties": {"a": False}, "required": ["a"], "type": "object"}),
    "C6 two types at once": JsonSchema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "a keyword nobody enforces": JsonSchema({"type": "array", "uniqueItems": True}),
}

# Strange, but within bounds: compiled, and every mask after a few tokens comes in time or ends in a typed error.
ENDURED: dict[str, Constraint] = {
    "C5 a repetition of a repetition": Grammar('start: (("a"{1000}){1000}){1000}'),
    "C5 a rule without an end": Grammar('start: "a" start'),
    "C4 a huge product": Regex("([^a]{1,10000}){1,10000}"),
    "C1 nested choices": JsonSchema(nested_any_of(8)),
    "C1 2^8 combinations": JsonSchema(product_of_choices(8)),
    "C2 a tree": JsonSchema(TREE),
    "C2 a chain of references": JsonSchema(references(100)),
    "C3 an enum of 4,000": JsonSchema({"enum": [f"s{i}" for i in range(4000)]}),
    "C4 nested repetitions": Regex("(a+)+b"),
    "C4 twice the same": Regex("(a|a)*"),
    "C4 a memory of 20 characters": Regex(".*a.{20}"),
    "C4 a long count": Regex("b?a{1000000000}"),
    "C4 counts of counts": Regex("b?(((a{100}){100}){100}){100}"),
    "C5 left recursion": Grammar('start: start "a" | "b"'),
    "C5 ambiguity": Grammar('start: start start start | start start | "a" | '),
    "C5 nothing, many times": Grammar('start: a*\na: b*\nb: c*\nc: "x"?'),
    "C6 a long list": JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "C6 a long string": JsonSchema({"type": "string", "maxLength": 10**9}),
    "C6 many properties": JsonSchema({"type": "object", "minProperties": 10**9}),
    "a long constant": JsonSchema({"const": "lorem ipsum " * 1500}),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_time(name: str) -> None:
    before, started_at = resident_bytes(), time.thread_time()
    with pytest.raises(ConstraintError) as refusal:
        compiler().compile(REFUSED[name])
    assert time.thread_time() - started_at < MAX_COMPILE_S
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert len(str(refusal.value)) < 400
    assert "root:" not in str(refusal.value)  # nothing of any file
    assert accepts(compiler().compile(Regex("a")), tokenizer("byte"), "a")


@pytest.mark.parametrize("name", ENDURED)
def test_what_is_strange_but_bounded_is_followed_or_ends_in_a_typed_error(name: str) -> None:
    before, started_at = resident_bytes(), time.thread_time()
    compiled = compiler().compile(ENDURED[name])
    assert time.thread_time() - started_at < MAX_COMPILE_S
    matcher, ids = compiled.matcher(), []
    for _ in range(NUM_STEPS):
        asked_at = time.thread_time()
        allowed = allowed_tokens(matcher.mask_after(ids, 0), tokenizer("byte").vocab_size).nonzero()[0]
        assert time.thread_time() - asked_at < MAX_MASK_S
        assert len(allowed) or matcher.error is not None
        texts = [int(i) for i in allowed if not tokenizer("byte").is_control(int(i))]
        if not texts:
            break
        ids.append(texts[len(ids) % len(texts)])
    assert resident_bytes() - before < MAX_GROWTH_BYTES


def test_a_million_strings_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConstraintError, match=f"at most {MAX_CONSTRAINT_BYTES:,}"):
        JsonSchema({"enum": [f"s{i}" for i in range(10**6)]})
    with pytest.raises(ConstraintError, match=f"at most {MAX_CONSTRAINT_BYTES:,}"):
        Grammar("\n".join(f'r{i}: "x"' for i in range(50_000)))


def test_a_schema_nested_too_deeply_is_refused() -> None:
    text = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    with pytest.raises(ConstraintError):
        compiler().compile(JsonSchema(text))


@pytest.mark.parametrize(
    ("change", "schema"),
    [
        ({"cpu_s": 1}, {"type": "integer", "multipleOf": 10_000_019}),  # minutes and gigabytes, if it were let
        ({"memory_bytes": 8 << 20}, {"enum": [f"number {i}" for i in range(4000)]}),
    ],
    ids=["time", "memory"],
)
def test_a_compile_that_takes_too_much_time_or_memory_is_ended(change: dict[str, Any], schema: dict[str, Any]) -> None:
    words = tokenizer("byte")
    limits = CompilerLimits(sandbox=replace(SandboxLimits(), **change))
    one = ConstraintCompiler(words, words.vocab_size, limits)
    before = resident_bytes()
    with pytest.raises(ConstraintError, match=r"simplify it|memory"):
        one.compile(JsonSchema(json.dumps(schema)))
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert one.cached_bytes == 0


def test_a_machine_too_busy_to_compile_says_come_back() -> None:
    words = tokenizer("byte")
    limits = CompilerLimits(sandbox=SandboxLimits(timeout_s=0.001))
    with pytest.raises(CapacityError, match="too busy"):
        ConstraintCompiler(words, words.vocab_size, limits).compile(Regex("a"))
