"""A long text is cut into tokens only as long as somebody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvarn.cancellation import require_wanted, wanted_until
from kvarn.errors import Cancelled
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from tests.unit.tokenizer.vocabularies import byte_level, sentence_piece, word_piece

WORDS = " ".join(f"w{number}" for number in range(50_000))


class EndsAfter(threading.Event):
    """Set when it is asked for the nth time."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_left = number

    def is_set(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0


@pytest.mark.parametrize("vocabulary", [byte_level, sentence_piece], ids=["byte", "sentence"])
def test_a_long_text_is_left_in_its_middle(vocabulary: Callable[[], dict[str, Any]]) -> None:
    tokenizer = tokenizer_from_gguf(vocabulary())
    asked = EndsAfter(10**9)
    with wanted_until(asked):
        whole = tokenizer.encode(WORDS)
    assert whole == tokenizer.encode(WORDS)
    num_asked = 10**9 - asked.num_left
    assert num_asked >= 20
    ended = EndsAfter(num_asked // 2)
    with wanted_until(ended), pytest.raises(Cancelled):
        tokenizer.encode(WORDS)
    assert ended.num_left == 0


@pytest.mark.parametrize("vocabulary", [byte_level, sentence_piece, word_piece], ids=["byte", "sentence", "word"])
def test_what_is_not_wanted_is_not_begun(vocabulary: Callable[[], dict[str, Any]]) -> None:
    ended = threading.Event()
    ended.set()
    with wanted_until(ended), pytest.raises(Cancelled):
        tokenizer_from_gguf(vocabulary()).encode("some words")


def test_only_the_work_inside_ends() -> None:
    ended = threading.Event()
    ended.set()
    with wanted_until(ended), wanted_until(threading.Event()):
        require_wanted()
    require_wanted()
    with wanted_until(ended), pytest.raises(Cancelled):
        require_wanted()
