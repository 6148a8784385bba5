"""An answer that follows one of several constraints: all that begin alike stay open until it has left them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvarn.structured.constraints import Grammar, JsonSchema, Regex
from kvarn.structured.either_matcher import EitherConstraint
from tests.unit.structured.constrained import accepts, compiler, tokenizer

CALL = Grammar(
    'start: call ("\\n" call)*\ncall: "{\\"name\\": \\"go\\", \\"arguments\\": " object "}"\nobject: %json {}\n'
)
TEXT = JsonSchema({"properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False})


def either(kind: str = "byte") -> EitherConstraint:
    return EitherConstraint(tuple(compiler(kind).compile(one) for one in (CALL, TEXT)))


@pytest.mark.parametrize("kind", ["byte", "sentence"])
def test_either_takes_what_one_of_them_takes(kind: str) -> None:
    call = '{"name": "go", "arguments": {"a": 1}}'
    for text in (call, f"{call}\n{call}", '{"name": "go"}', '{"name": "other"}', '{ "name" :"x"}'):
        assert accepts(either(kind), tokenizer(kind), text), text
    for text in ("", "{", '{"name": "go", "arguments": ', '{"name": "other", "arguments": {}}', '{"name": "go"}\n{}'):
        assert not accepts(either(kind), tokenizer(kind), text), text


def test_the_position_follows_from_the_tokens_alone() -> None:
    ids = tokenizer("byte").encode('{"name": "go", "arguments": {}}', add_special=False)
    steady, jumping = either().matcher(), either().matcher()
    masks = [steady.mask_after(ids[:count], 0) for count in range(len(ids) + 1)]
    order = [5, 2, len(ids), 0, len(ids) - 1]
    for count in (one for pair in pairwise(order) for one in pair):
        assert (jumping.mask_after(ids[:count], 0) == masks[count]).all()
    assert jumping.error is None


def test_it_is_complete_when_nothing_may_follow_and_fails_when_all_have_failed() -> None:
    both = EitherConstraint(tuple(compiler().compile(Regex(pattern)) for pattern in ("ab", "abc")))
    (a, b, c), end = tokenizer("byte").encode("abc", add_special=False), next(iter(tokenizer("byte").eos_ids))
    matcher = both.matcher()
    assert [matcher.accept_token(one) for one in (a, b)] == [False, False]  # "ab" may end here, "abc" go on
    assert matcher.accept_token(c)
    ended = both.matcher()
    assert [ended.accept_token(one) for one in (a, b, end)] == [False, False, True]
    wrong = both.matcher()
    assert not wrong.accept_token(c)
    assert wrong.error is not None
    assert not wrong.mask_after([c], 0).any()
