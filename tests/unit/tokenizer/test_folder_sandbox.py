"""Hostile tokenizer.json files are refused in a process of their own; this one stays small."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvarn.errors import FormatError, InvalidParameter
from kvarn.tokenizer.encoders.encoder import encode_plain
from kvarn.tokenizer.folder_sandbox import MAX_GROWTH, TokenizerLimits, try_tokenizer
from kvarn.tokenizer.from_folder import tokenizer_from_folder
from tests.unit.tokenizer.test_from_folder import byte_level, metaspace, saved, word_piece

BACKTRACKS = r"(a+)+(a+)+(a+)+(a+)+(a+)+$"


def changed(**changes: Any) -> dict[str, Any]:
    tokenizer_json: dict[str, Any] = json.loads(byte_level().to_str())
    return tokenizer_json | {"added_tokens": [], "post_processor": None} | changes


def replaces(*contents: str) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": content} for content in contents]
    return {"type": "Sequence", "normalizers": steps}


def splits(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("make", [byte_level, metaspace, word_piece])
def test_usual_tokenizers_pass(make: Any) -> None:
    tokenizer_json = json.loads(make().to_str())
    assert json.loads(try_tokenizer(tokenizer_json)) == tokenizer_json


def test_replacements_that_feed_each_other_are_refused_before_anything_is_built() -> None:
    before = time.perf_counter()
    with pytest.raises(FormatError, match=r"make 1,000,000,000,000,000,000 characters of one; at most 32"):
        try_tokenizer(changed(normalizer=replaces(*["a" * 1000] * 6)))
    assert time.perf_counter() - before < 1


@pytest.mark.parametrize(
    "normalizer",
    [
        replaces("a" * (MAX_GROWTH + 1)),
        {"type": "Replace", "pattern": {"Regex": "a|b"}, "content": "x" * 100},
        {"type": "Prepend", "prepend": "x" * 1000},
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 4000 + b"\0").decode()},
    ],
)
def test_a_step_that_makes_much_of_little_is_refused(normalizer: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="characters of one; at most"):
        try_tokenizer(changed(normalizer=normalizer))


def test_what_the_static_check_does_not_see_is_measured() -> None:
    """A pattern that matches nothing puts its replacement between all characters."""
    inserts = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * MAX_GROWTH}
    with pytest.raises(FormatError, match="the tokenizer cannot be used"):
        try_tokenizer(changed(normalizer=inserts))


@pytest.mark.parametrize("steps", [5, True, "ab", {"a": 1}], ids=str)
def test_steps_that_are_no_list_are_refused(steps: object) -> None:
    with pytest.raises(FormatError, match="cannot be used"):
        try_tokenizer(changed(normalizer={"type": "Sequence", "normalizers": steps}))


def test_more_steps_than_any_tokenizer_has_are_refused() -> None:
    with pytest.raises(FormatError, match="more than 128 steps"):
        try_tokenizer(changed(normalizer=replaces(*["b"] * 200)))


@pytest.mark.parametrize("pattern", [BACKTRACKS, "((", "(q|q|q)*(q|q)*!!", r"(\s+\w+)+(\s+\w+)+(\s+\w+)+%%"])
def test_patterns_that_panic_or_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(FormatError, match="the tokenizer cannot be used"):
        try_tokenizer(changed(pre_tokenizer=splits(pattern)))


def test_a_child_that_runs_out_of_memory_or_time_ends_alone() -> None:
    for limits in (TokenizerLimits(memory_bytes=1 << 20, memory_per_byte=0), TokenizerLimits(cpu_s=0)):
        with pytest.raises(FormatError, match="cannot be used"):
            try_tokenizer(changed(), limits)


def test_a_folder_with_a_hostile_tokenizer_costs_this_process_nothing(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(changed(pre_tokenizer=splits(BACKTRACKS))))
    before = resident_bytes()
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        tokenizer_from_folder(folder)
    assert resident_bytes() - before < 64 << 20


def test_a_text_that_makes_the_package_panic_is_refused_and_no_panic_escapes() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(BACKTRACKS), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    assert encode_plain(tokenizer, "b") == [0]
    with pytest.raises(InvalidParameter, match="cannot encode this text"):
        encode_plain(tokenizer, "a" * 4000 + "!")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
