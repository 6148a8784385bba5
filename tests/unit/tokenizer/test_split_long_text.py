"""A long text is split into chunks whose words are those of the text, whatever the rule of the model."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.tokenizer.encoders.pretokenize import CHUNK_CHARACTERS, MAX_RUN, RULES, build_pre_tokenizer, split_long_text
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from tests.unit.tokenizer.vocabularies import byte_level

LETTERS = ["a", "B", "don't", "ß", "字", "か", "한", "é", "e\u0301", "क्", "م", "1", "23", "٣"]
OTHERS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u3000",
    "\u00a0",
    ".",
    ",",
    "!",
    "'",
    "/",
    "(",
    "…",
    "。",
    "_",
    "$",
    "🙂",
]
texts = st.lists(st.sampled_from(LETTERS + OTHERS + [" "] * 8 + ["\n"] * 4 + ["x"] * 8), max_size=60).map("".join)


@pytest.mark.parametrize("name", sorted({rule: name for name, rule in RULES.items()}.values()))
def test_the_words_of_the_chunks_are_those_of_the_text(name: str) -> None:
    splitter = build_pre_tokenizer(RULES[name])

    @given(texts, st.integers(1, 5))
    @settings(max_examples=200)
    def check(text: str, size: int) -> None:
        chunks = list(split_long_text(text, size, max_run=1000))
        assert "".join(chunks) == text
        words = [word for chunk in chunks for word, _ in splitter.pre_tokenize_str(chunk)]
        assert words == [word for word, _ in splitter.pre_tokenize_str(text)]

    check()


def test_prose_comes_in_chunks_and_what_has_no_words_does_too() -> None:
    prose = "The mill grinds grain, and the miller sings.\n" * 2000
    assert max(map(len, split_long_text(prose))) < CHUNK_CHARACTERS + 100
    blob = "x1" * 100_000
    assert list(map(len, split_long_text(blob))) == [MAX_RUN, MAX_RUN, MAX_RUN, 200_000 - 3 * MAX_RUN]


def test_other_threads_run_while_a_long_text_is_encoded(patience: float) -> None:
    """Found so: eight megabytes held the interpreter for half a minute, and the watchdog ended the server."""
    tokenizer = tokenizer_from_gguf(byte_level())
    longest_s, is_done = 0.0, False

    def watch() -> None:
        nonlocal longest_s
        while not is_done:
            before = time.perf_counter()
            time.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode(" ".join(f"w{number}" for number in range(120_000)))
    took_s, is_done = time.perf_counter() - began, True
    thread.join()
    assert longest_s < max(took_s / 3, 0.1 * patience)


@pytest.mark.parametrize("name", sorted({rule: name for name, rule in RULES.items()}.values()))
def test_long_runs_take_time_in_proportion_to_their_length(name: str) -> None:
    splitter = build_pre_tokenizer(RULES[name])

    def seconds(run: str, length: int) -> float:
        begin = time.process_time()
        splitter.pre_tokenize_str((run * length)[:length])
        return time.process_time() - begin

    for run in ("a", " ", "\n", "1", "٣", "'", "Aa"):
        few, many = (min(seconds(run, length) for _ in range(2)) for length in (2000, 8000))
        assert many < 10 * max(few, 0.002), run  # four times as many characters; looking ahead from each takes 16 times
