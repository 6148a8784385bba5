"""Nothing a model says may drive the terminal."""

from __future__ import annotations

import pytest

from kvarn.cli.terminal.text import printable, printable_name, table_lines


@pytest.mark.parametrize("code", [0, 7, 8, 13, 27, 127, 0x9B])
def test_control_characters_are_replaced(code: int) -> None:
    assert printable(f"a{chr(code)}b") == "a\N{REPLACEMENT CHARACTER}b"


def test_text_tabs_and_newlines_pass() -> None:
    assert printable("größe\t一\n🙂") == "größe\t一\n🙂"


@pytest.mark.parametrize("char", ["\n", "\t", "\x1b", "\u2028", "\u202e", "\u2066"])
def test_a_name_breaks_and_turns_no_line(char: str) -> None:
    assert printable_name(f"größe {char}gpj.exe") == "größe \N{REPLACEMENT CHARACTER}gpj.exe"


def test_columns_are_as_wide_as_their_longest_cell_and_the_last_is_not_padded() -> None:
    assert list(table_lines([("NAME", "N", "PATH"), ("a", "10", "/b c"), ("long name", "1", "/")])) == [
        "NAME       N   PATH",
        "a          10  /b c",
        "long name  1   /",
    ]
