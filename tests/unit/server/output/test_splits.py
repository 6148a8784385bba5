"""However an answer is cut into pieces, the stream adds up to what parse_output makes of the whole text."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.server.chat.output.deltas import ContentDelta, ToolCallStart
from kvarn.server.chat.output.json_repair import is_strict_object
from kvarn.server.chat.output.output_stream import AnswerContext
from tests.conftest import Size
from tests.unit.server.output.texts import (
    FORMATS,
    FRAGMENTS,
    TOOLS,
    cut,
    hostile_text,
    nearly_right_text,
    parse_output,
    read_pieces,
    told,
    written_call,
)

CIRCUMSTANCES = {
    "free": AnswerContext("seed"),
    "enforced": AnswerContext("seed", is_enforced=True),
    "in reasoning": AnswerContext("seed", starts_in_reasoning=True),
    "enforced in reasoning": AnswerContext("seed", is_enforced=True, starts_in_reasoning=True),
}


@pytest.mark.parametrize("around", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
@pytest.mark.parametrize("form", FORMATS)
def test_any_split_adds_up_to_the_whole(form: str, around: AnswerContext, size: Size) -> None:
    rng = random.Random(f"{form} {around}")
    num_calls = 0
    for _ in range(size(100, 1000)):
        text = hostile_text(rng) if rng.random() < 0.5 else nearly_right_text(rng, form)
        whole = parse_output(text, FORMATS[form], TOOLS, around)
        num_calls += len(whole.tool_calls)
        for pieces in (cut(rng, text), list(text)):
            assert read_pieces(pieces, FORMATS[form], around) == whole, (text, pieces)
    assert num_calls > 0 or FORMATS[form].tool_format is None or around.starts_in_reasoning


@pytest.mark.parametrize("around", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
@pytest.mark.parametrize("form", FORMATS)
def test_content_tells_where_it_stands_in_the_answer(form: str, around: AnswerContext, size: Size) -> None:
    rng = random.Random(f"{form} {around}")
    for _ in range(size(60, 1000)):
        text = hostile_text(rng) if rng.random() < 0.5 else nearly_right_text(rng, form)
        deltas = told(cut(rng, text), FORMATS[form], around)
        content = [delta for delta in deltas if isinstance(delta, ContentDelta)]
        assert all(text[delta.at : delta.at + len(delta.text)] == delta.text for delta in content)
        ends = [delta.at + len(delta.text) for delta in content]
        assert all(end <= after.at for end, after in zip(ends, content[1:], strict=False))


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=20),
    form=st.sampled_from(sorted(FORMATS)),
    around=st.sampled_from(sorted(CIRCUMSTANCES)),
)
def test_any_list_of_pieces_adds_up_to_the_whole(pieces: list[str], form: str, around: str) -> None:
    whole = parse_output("".join(pieces), FORMATS[form], TOOLS, CIRCUMSTANCES[around])
    assert read_pieces(pieces, FORMATS[form], CIRCUMSTANCES[around]) == whole


@pytest.mark.parametrize("form", FORMATS)
def test_text_without_calls_or_reasoning_is_content_to_the_letter(form: str, size: Size) -> None:
    rng = random.Random(form)
    num_plain = 0
    for _ in range(size(200, 2000)):
        text = hostile_text(rng)
        parsed = parse_output(text, FORMATS[form], TOOLS)
        if parsed.reasoning is None and not parsed.tool_calls and not _opens_reasoning(text, form):
            assert (parsed.content or "") == text
            num_plain += 1
    assert num_plain > 20


@pytest.mark.parametrize("form", FORMATS)
def test_free_calls_are_known_and_sound(form: str, size: Size) -> None:
    rng = random.Random(form)
    for _ in range(size(200, 2000)):
        text = nearly_right_text(rng, form)
        parsed = parse_output(text, FORMATS[form], TOOLS)
        for call in parsed.tool_calls:
            assert call.name in TOOLS
            assert is_strict_object(call.arguments_json)
            assert call.arguments_json in text


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3", "json"])
def test_enforced_calls_are_sound_unless_they_were_cut_off(form: str, size: Size) -> None:
    rng = random.Random(form)
    num_cut = 0
    for _ in range(size(200, 2000)):
        text = "".join(written_call(rng, form) for _ in range(2))
        text = text[: rng.choice([len(text), rng.randint(0, len(text))])]
        parsed = parse_output(text, FORMATS[form], TOOLS, AnswerContext(is_enforced=True))
        are_sound = [is_strict_object(call.arguments_json) for call in parsed.tool_calls]
        assert all(are_sound[:-1])
        assert all(are_sound) or parsed.is_cut
        num_cut += parsed.is_cut
    assert num_cut > 20


@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_numbered_in_order_and_their_ids_follow_from_the_seed(form: str) -> None:
    rng = random.Random(form)
    for _ in range(50):
        text = nearly_right_text(rng, form)
        starts = [d for d in told(list(text), FORMATS[form], AnswerContext("a")) if isinstance(d, ToolCallStart)]
        assert [start.index for start in starts] == list(range(len(starts)))
        again = [call.id for call in parse_output(text, FORMATS[form], TOOLS, AnswerContext("a")).tool_calls]
        others = [call.id for call in parse_output(text, FORMATS[form], TOOLS, AnswerContext("b")).tool_calls]
        assert [start.id for start in starts] == again
        assert not set(again) & set(others)


HOSTILE = (
    *("<tool_call>", "<tool_call>{", '<tool_call>{"type": "', "[TOOL_CALLS]f", '{"', "; {"),
    *("```", "```json\n", "\n{", "\n[", "a\n", "\n\n\n ", "[\n{", '```\n[\n{"name": "f", "arguments": {', "\n`"),
    *('\n{"name": "f", "arguments":', '\nx\n{"name": "f", "arguments": {"c": 1}}', "\n<tool_call>\n[\n"),
)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3", "json"])
def test_hostile_text_takes_time_in_proportion_to_its_length(form: str, text: str, patience: float, size: Size) -> None:
    num_characters = size(40_000, 200_000)
    started_at = time.process_time()
    parsed = parse_output(text * (num_characters // len(text)), FORMATS[form], TOOLS)
    assert time.process_time() - started_at < 2e-5 * num_characters * patience
    assert parsed.tool_calls == ()


def _opens_reasoning(text: str, form: str) -> bool:
    tags = FORMATS[form].reasoning
    return tags is not None and text.lstrip(" \t\r\n").startswith(tags.open)
