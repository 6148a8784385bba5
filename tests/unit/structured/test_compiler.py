"""Constraints become masks over any vocabulary; compiled ones are shared, kept by bytes, and started anew."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import kvarn
from kvarn.errors import CapacityError, ConstraintError, InvalidParameter
from kvarn.sampling.token_masks import allowed_tokens, apply_mask, is_allowed, num_words
from kvarn.structured.compiler import CompilerLimits, ConstraintCompiler
from kvarn.structured.constraints import MAX_CONSTRAINT_BYTES, Grammar, JsonSchema, Regex
from tests.unit.structured.constrained import accepts, compiler, first_texts, tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["byte", "sentence"])
@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (JsonSchema(PERSON), ['{"name":"a","age":7}', '{ "name": "", "age": 150 }'], ['{"name":"a"}', '{"age":7}', ""]),
        (JsonSchema(None), ["{}", '{"a": [1, null, {"b": true}]}'], ["[]", "1", "{"]),
        (JsonSchema(True), ["1", '"a"', "[null]"], ["", "nul"]),
        (JsonSchema('{"enum": ["a", "ab", 3]}'), ['"a"', '"ab"', "3"], ['"b"', "33", "a"]),
        (Regex("(yes|no)!?"), ["yes", "no", "no!"], ["maybe", "ye", "yes!!", ""]),
        (Regex("[a-c ]+"), ["a b c", " a", "cab"], ["d", ""]),
        (Grammar('start: "a" rest\nrest: "b" rest | "c"'), ["ac", "abbbc"], ["a", "abb", "c"]),
        (Regex(""), [""], ["a"]),
    ],
    ids=str,
)
def test_a_constraint_accepts_its_texts_and_no_others(
    kind: str, constraint: kvarn.JsonSchema | kvarn.Regex | kvarn.Grammar, good: list[str], bad: list[str]
) -> None:
    compiled = compiler(kind).compile(constraint)
    assert [text for text in good if not accepts(compiled, tokenizer(kind), text)] == []
    assert [text for text in bad if accepts(compiled, tokenizer(kind), text)] == []


def test_a_vocabulary_that_cannot_write_every_text_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"no token for the byte 0x0A and \d+ others"):
        compiler("word").compile(Regex("hello"))


def test_the_tokens_of_a_forced_text_are_those_the_tokenizer_would_take() -> None:
    for kind in ("byte", "sentence"):
        words = tokenizer(kind)
        mask = compiler(kind).compile(Regex("abcabc")).matcher().mask_after((), 0)
        (first,) = allowed_tokens(mask, words.vocab_size).nonzero()[0]
        assert words.token_text(int(first)) == ("a" if kind == "byte" else "abc")


def test_control_tokens_are_no_text() -> None:
    assert first_texts(Regex(r"<\|im_start\|>x")) == {b"<"}


def test_a_grammar_may_name_a_control_token() -> None:
    start = next(i for i in range(tokenizer("byte").vocab_size) if tokenizer("byte").token_text(i) == "<|im_start|>")
    for named in ("<|im_start|>", f"<[{start}]>"):
        mask = compiler().compile(Grammar(f'start: {named} "a"')).matcher().mask_after((), 0)
        assert allowed_tokens(mask, tokenizer("byte").vocab_size).nonzero()[0].tolist() == [start]


def test_every_token_that_ends_a_turn_may_end_an_answer() -> None:
    words = tokenizer("byte")
    mask = compiler().compile(Regex("a*")).matcher().mask_after((), 0)
    assert len(words.eos_ids) == 2
    assert all(is_allowed(mask, eos) for eos in words.eos_ids)


def test_ids_that_only_the_model_has_are_never_allowed() -> None:
    words = tokenizer("byte")
    size = words.vocab_size + 70
    mask = ConstraintCompiler(words, size).compile(Regex("(.|\n)*")).matcher().mask_after((), 0)
    assert mask.shape == (num_words(size),)
    assert not allowed_tokens(mask, size)[words.vocab_size :].any()


@pytest.mark.parametrize("kind", ["byte", "sentence"])
@pytest.mark.parametrize("text", ["é", "日本", "😀", "👩‍👩‍👧", "a\\n\\u0007b", '\\"', "\\\\"])
def test_characters_cut_anywhere_are_accepted_byte_by_byte(kind: str, text: str) -> None:
    compiled = compiler(kind).compile(JsonSchema({"type": "string"}))
    assert accepts(compiled, tokenizer(kind), f'"{text}"')


def test_length_counts_characters_not_bytes() -> None:
    compiled = compiler().compile(JsonSchema({"type": "string", "maxLength": 2}))
    assert accepts(compiled, tokenizer("byte"), '"😀é"')
    assert not accepts(compiled, tokenizer("byte"), '"😀éa"')


def test_white_space_in_json_is_bounded() -> None:
    compiled = compiler().compile(JsonSchema(PERSON))
    assert accepts(compiled, tokenizer("byte"), '{\n    "name": "a",\n    "age": 1\n}')
    assert not accepts(compiled, tokenizer("byte"), "{" + " " * 33 + '"name":"a","age":1}')


def test_a_long_text_without_alternatives_is_written_as_it_is() -> None:
    text = "lorem " * 5000
    compiled = compiler().compile(JsonSchema({"const": text}))
    matcher, ids = compiled.matcher(), []
    for _ in range(40):
        ids.append(int(allowed_tokens(matcher.mask_after(ids, 0), tokenizer("byte").vocab_size).nonzero()[0][0]))
    assert tokenizer("byte").decode(ids) == f'"{text}"'[: len(tokenizer("byte").decode(ids))]


def test_a_step_that_was_undone_changes_nothing() -> None:
    compiled = compiler().compile(JsonSchema(PERSON))
    ids = tokenizer("byte").encode('{"name":"hello","age":1', add_special=False)
    wanted = compiled.matcher().mask_after(ids, 0)
    matcher = compiled.matcher()
    matcher.mask_after(ids, 0)
    matcher.accept_token(tokenizer("byte").encode("}", add_special=False)[0])
    np.testing.assert_array_equal(matcher.mask_after(ids, 0), wanted)


def test_a_prompt_is_no_part_of_the_answer() -> None:
    matcher = compiler().compile(Regex("ab")).matcher()
    prompt, (a, b) = [1, 2, 3], tokenizer("byte").encode("ab", add_special=False)
    assert is_allowed(matcher.mask_after([*prompt, a], 3), b)


def test_a_token_that_is_not_allowed_is_a_dead_end() -> None:
    matcher = compiler().compile(Regex("ab")).matcher()
    b = tokenizer("byte").encode("b", add_special=False)[0]
    assert not matcher.accept_token(b)
    assert not matcher.mask_after([b], 0).any()
    assert isinstance(matcher.error, ConstraintError)


def test_the_same_constraint_is_compiled_once() -> None:
    one = ConstraintCompiler(tokenizer("byte"), tokenizer("byte").vocab_size)
    assert one.compile(JsonSchema({"a": 1, "type": "null"})) is one.compile(JsonSchema('{"a": 1, "type": "null"}'))
    assert one.compile(Regex("a")) is not one.compile(Grammar('start: "a"'))


def test_compiled_constraints_are_kept_up_to_a_number_of_bytes() -> None:
    limits = CompilerLimits(cached_bytes=1_500_000)
    one = ConstraintCompiler(tokenizer("byte"), tokenizer("byte").vocab_size, limits)
    first = one.compile(Regex("a0"))
    for i in range(1, 12):
        one.compile(Regex(f"a{i}"))
        assert 0 < one.cached_bytes <= 1_500_000
    assert one.compile(Regex("a0")) is not first  # the least recently used went first
    assert accepts(first, tokenizer("byte"), "a0")  # a holder of an evicted constraint can still use it


def test_one_that_is_too_large_to_keep_is_used_all_the_same() -> None:
    one = ConstraintCompiler(tokenizer("byte"), tokenizer("byte").vocab_size, CompilerLimits(cached_bytes=1))
    assert accepts(one.compile(Regex("a")), tokenizer("byte"), "a")
    assert one.cached_bytes == 0


def test_more_compilers_than_allowed_are_told_to_come_back() -> None:
    limits = CompilerLimits(max_compiling=1, wait_s=0.05)
    slow = Grammar("start: " + " | ".join(f'"w{i}"' for i in range(2000)))
    one = ConstraintCompiler(tokenizer("byte"), tokenizer("byte").vocab_size, limits)
    errors: list[Exception] = []

    def compile_other(number: int) -> None:
        try:
            one.compile(replace(slow, lark=f"{slow.lark}\n// {number}"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_other, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} == {CapacityError}
    assert accepts(one.compile(Regex("a")), tokenizer("byte"), "a")  # every place was given back


@pytest.mark.parametrize(
    "make",
    [
        lambda: JsonSchema("{"),
        lambda: JsonSchema('{"a":1,"a":2}'),
        lambda: JsonSchema('{"minimum": NaN}'),
        lambda: JsonSchema({"minimum": float("inf")}),
        lambda: JsonSchema({"enum": [object()]}),
        lambda: JsonSchema("[1]"),
        lambda: JsonSchema(False),
        lambda: JsonSchema({"enum": ["\ud800"]}),
        lambda: Regex(b"a"),  # type: ignore[arg-type]
        lambda: Regex("\ud800"),
        lambda: Grammar(None),  # type: ignore[arg-type]
        lambda: Grammar("// " + "x" * MAX_CONSTRAINT_BYTES),
    ],
)
def test_a_malformed_constraint_is_refused_when_it_is_made(make: object) -> None:
    with pytest.raises(ConstraintError):
        make()  # type: ignore[operator]


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, object] = {}
    schema["not"] = schema
    with pytest.raises(ConstraintError, match="JSON"):
        JsonSchema(schema)


def test_other_values_are_no_constraint() -> None:
    with pytest.raises(InvalidParameter, match=r"give a kvarn\.JsonSchema"):
        kvarn.SamplingParams(constraint={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="ignore_eos"):
        kvarn.SamplingParams(constraint=Regex("a"), ignore_eos=True)


def test_a_keyword_that_cannot_be_enforced_is_refused_even_when_the_schema_asks_for_leniency() -> None:
    with pytest.raises(ConstraintError, match="uniqueItems"):
        compiler().compile(JsonSchema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}))


def test_masked_logits_are_minus_infinity() -> None:
    mask = np.zeros(2, np.uint32)
    mask[1] = 1 << 5
    logits = apply_mask(np.ones(40, np.float32), mask)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [37]
    assert apply_mask(logits, None) is logits


def test_importing_and_making_a_compiler_leaves_llguidance_alone() -> None:
    code = (
        "import sys, kvarn, kvarn.llm\n"
        "from kvarn.structured.compiler import ConstraintCompiler\n"
        "kvarn.SamplingParams(constraint=kvarn.JsonSchema())\n"
        "print('llguidance' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60) == b"False\n"
