"""Finding special tokens: leftmost, then longest, never over a character that was marked as plain."""

from __future__ import annotations

from kvarn.tokenizer.special_tokens import MatchRules, Segment, SpecialMatcher

IDS = {"<a>": 1, "<ab>": 2, "<ab><": 3, "x": 4, "  ": 5, "   ": 6}


def parts(text: str, plain: tuple[int, ...] = ()) -> list[tuple[str, int | None]]:
    return [(segment.text, segment.token_id) for segment in SpecialMatcher(IDS).split(text, plain)]


def test_the_leftmost_then_longest_token_is_taken() -> None:
    assert parts("1<ab><a>2") == [("1", None), ("<ab><", 3), ("a>2", None)]
    assert parts("<a><ab>") == [("<a>", 1), ("<ab>", 2)]


def test_a_token_of_one_character_is_found_beside_longer_ones() -> None:
    assert parts("axx<a>") == [("a", None), ("x", 4), ("x", 4), ("<a>", 1)]


def test_runs_are_taken_as_the_longest_tokens() -> None:
    assert parts("a     b") == [("a", None), ("   ", 6), ("  ", 5), ("b", None)]


def test_a_marked_character_is_part_of_no_token() -> None:
    assert parts("<a><a>", plain=(0,)) == [("<a>", None), ("<a>", 1)]
    assert parts("<a><a>", plain=(4,)) == [("<a>", 1), ("<a>", None)]
    assert parts("x", plain=(0,)) == [("x", None)]


def test_a_shorter_token_is_taken_when_the_longer_one_covers_a_mark() -> None:
    assert parts("<ab><", plain=(4,)) == [("<ab>", 2), ("<", None)]


def test_text_without_tokens_and_no_text_stay_as_they_are() -> None:
    assert parts("abc<") == [("abc<", None)]
    assert parts("") == []
    assert list(SpecialMatcher({}).split("abc")) == [Segment("abc", None)]


def test_possible_starts_are_where_tokens_begin_or_could() -> None:
    matcher = SpecialMatcher({"<a>": 1, "<b>": 2})
    assert matcher.possible_starts("a <a> <b") == [2, 6]
    assert matcher.possible_starts("<") == [0]
    assert matcher.possible_starts("a < b") == []
    assert matcher.possible_starts("") == []


def test_stripping_tokens_take_the_white_space_beside_them() -> None:
    matcher = SpecialMatcher({"<r>": 1, "<l>": 2}, MatchRules(rstrip=frozenset({1}), lstrip=frozenset({2})))
    found = [segment.text for segment in matcher.split("a <r>\n b <l> c")]
    assert found == ["a ", "<r>", "b", "<l>", " c"]
