"""Stop strings: never emitted, however the text is cut into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.engine.stop_strings import StopMatcher
from kvarn.types import FinishReason, SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import complete, make_engine, run_to_end, saying, tokens_of


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.found


def test_a_stop_string_across_pieces_is_found_and_not_emitted() -> None:
    assert feed(("END",), ["one E", "N", "D two"]) == ("one ", "END")


def test_text_that_only_looked_like_a_stop_string_comes_out() -> None:
    assert feed(("END",), ["one EN", "GLISH"]) == ("one ENGLISH", None)


def test_text_held_back_comes_out_at_the_end() -> None:
    assert feed(("END",), ["one EN"]) == ("one EN", None)


def test_a_repeated_beginning_is_still_found() -> None:
    assert feed(("aab",), list("aaab")) == ("a", "aab")


def test_the_stop_string_that_ends_first_wins() -> None:
    assert feed(("abcd", "b"), ["xabcd"]) == ("xa", "b")


@given(
    text=st.text(alphabet="ab\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_how_the_text_is_cut_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    emitted, found = feed(tuple(stops), pieces)
    assert (emitted, found) == feed(tuple(stops), list(text))
    assert not any(stop in emitted for stop in stops)
    assert found is not None or emitted == text


@pytest.mark.parametrize("stop", ["lo", "hello", "o", ("zzz", "ell")])
def test_a_completion_ends_before_its_stop_string(stop: str | tuple[str, ...]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
    completion = complete(make_engine(saying("hello world", "ab")), "ab", params)
    expected = stop if isinstance(stop, str) else "ell"
    assert completion.text == "hello world"[: "hello world".index(expected)]
    assert (completion.finish_reason, completion.stop_match) == (FinishReason.STOP, expected)


def test_held_back_text_is_flushed_when_the_answer_ends_otherwise() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, stop="lowland")
    completion = complete(make_engine(saying("hello world", "ab")), "ab", params)
    assert (completion.text, completion.finish_reason) == ("hello", FinishReason.LENGTH)


def test_a_stop_string_of_several_bytes_per_character_is_found() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop="ö")
    assert complete(make_engine(saying("grüßt höflich", "ab")), "ab", params).text == "grüßt h"


def test_an_answer_cut_within_a_character_has_no_broken_text_in_between() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    completion = complete(make_engine(saying("aü!", "ab")), "ab", params)
    assert completion.text == "aü"
    cut = complete(make_engine(saying("aü!", "ab")), "ab", params.replace(max_tokens=2))
    assert cut.text == "a\N{REPLACEMENT CHARACTER}"


def test_nothing_of_a_stop_string_is_streamed_before_it_is_complete() -> None:
    engine = make_engine(saying("one END two", "ab"))
    submit(engine, tokens_of("ab"), SamplingParams(temperature=0.0, max_tokens=20, stop="END"))
    texts = [event.text for event in run_to_end(engine)]
    assert texts == ["o", "n", "e", " ", "", "", ""]
