"""What the tests of constraints share: tiny vocabularies, and walks along a text token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kvarn.sampling.token_masks import allowed_tokens, is_allowed
from kvarn.structured.compiler import ConstraintCompiler
from kvarn.structured.constraints import Compiled, Constraint
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import byte_level, sentence_piece, word_piece


@cache
def tokenizer(kind: str) -> Tokenizer:
    """byte level | sentence piece | word piece."""
    return tokenizer_from_gguf({"byte": byte_level, "sentence": sentence_piece, "word": word_piece}[kind]())


@cache
def compiler(kind: str = "byte") -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer(kind), tokenizer(kind).vocab_size)


def accepts(compiled: Compiled, words: Tokenizer, text: str) -> bool:
    """Whether the text may be written and end there: in tokens as long as allowed, or as short; both must agree."""
    verdicts = {_writes(compiled, words, text, by_length) for by_length in (max, min)}
    assert len(verdicts) == 1, f"it depends on the spelling of {text!r}"
    return verdicts.pop()


def _writes(compiled: Compiled, words: Tokenizer, text: str, by_length: Callable[..., bytes]) -> bool:
    ids_of, data, ids = _ids_by_bytes(words), text.encode(), []
    matcher = compiled.matcher()
    while data:
        mask = matcher.mask_after(ids, 0)
        beginnings = [data[:length] for length in range(1, len(data) + 1)]
        fitting = {part: i for part in beginnings for i in ids_of.get(part, ()) if is_allowed(mask, i)}
        if not fitting:
            return False
        token = by_length(fitting, key=len)
        ids.append(fitting[token])
        data = data[len(token) :]
    mask = matcher.mask_after(ids, 0)
    return all(is_allowed(mask, eos) for eos in words.eos_ids)


@cache
def _ids_by_bytes(words: Tokenizer) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for token_id in range(words.vocab_size):
        if not words.is_control(token_id):
            found.setdefault(words.token_bytes(token_id), []).append(token_id)
    return found


def first_texts(constraint: Constraint, kind: str = "byte") -> set[bytes]:
    """The bytes of all tokens that may begin an answer."""
    words = tokenizer(kind)
    mask = compiler(kind).compile(constraint).matcher().mask_after((), 0)
    return {words.token_bytes(int(i)) for i in allowed_tokens(mask, words.vocab_size).nonzero()[0]}
