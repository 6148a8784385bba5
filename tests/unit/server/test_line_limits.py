"""Where an answer of /infill ends by its lines; however it is cut into parts, the same text is kept."""

from __future__ import annotations

import pytest

from kvarn.server.api.llama_server.line_limits import LineLimits, LineReader

TEXT = "x = 1\n    y\n\tz\n      w\n  end\nmore\n"


def kept(text: str, limits: LineLimits, size: int) -> tuple[str, bool]:
    reader = LineReader(limits)
    parts = [reader.take(text[start : start + size], 0.0) for start in range(0, len(text), size)]
    return "".join(parts), reader.is_over


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("min_indent", "expected"),
    [
        (0, TEXT),
        (1, "x = 1\n    y\n\tz\n      w\n  end\n"),
        (2, "x = 1\n    y\n\t"),
        (5, "x = 1\n    "),
    ],
)
def test_a_line_that_is_indented_less_is_the_end(size: int, min_indent: int, expected: str) -> None:
    assert kept(TEXT, LineLimits(min_indent), size) == (expected, expected != TEXT)


def test_an_empty_line_is_indented_less_and_the_first_line_is_none() -> None:
    assert kept("a\n  b\n\n  c", LineLimits(2), 1) == ("a\n  b\n", True)
    assert kept("a", LineLimits(2), 1) == ("a", False)


def test_when_the_time_is_up_the_line_is_written_to_its_end() -> None:
    reader = LineReader(LineLimits(max_ms=10))
    assert [reader.take("a\n", 10.0), reader.take("b", 11.0), reader.take("c\n", 12.0), reader.take("d", 13.0)] == [
        *("a\n", "b", "c\n"),
        "",
    ]
    assert reader.is_over


def test_nothing_of_the_next_line_is_kept_when_it_comes_with_the_end_of_the_last() -> None:
    reader = LineReader(LineLimits(max_ms=10))
    assert reader.take("b\nc\nd", 11.0) == "b\n"
    assert reader.is_over
