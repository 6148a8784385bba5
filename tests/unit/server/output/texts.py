"""Formats, tools and hostile texts for the tests of output/."""

from __future__ import annotations

import random
from collections.abc import Collection

from kvarn.server.chat.output.call_forms.detect import BRACKET_THINK, THINK
from kvarn.server.chat.output.deltas import Delta, ParsedOutput, joined
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream

TOOLS: dict[str, object] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "text": {"type": "string"}}},
    "get-time": {"type": "object", "additionalProperties": {"type": ["object", "string"]}},
    "f": {"type": "object", "not": {"required": ["c"]}},
}

FORMATS = {
    "hermes": OutputFormat("hermes"),
    "hermes+think": OutputFormat("hermes", THINK),
    "llama3": OutputFormat("llama3"),
    "mistral": OutputFormat("mistral"),
    "mistral+think": OutputFormat("mistral_names", BRACKET_THINK),
    "json": OutputFormat("json"),
    "json+think": OutputFormat("json", THINK),
    "reasoning only": OutputFormat(None, THINK),
}

FRAGMENTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "<|python_tag|>",
        "<|python",
        "[TOOL_CALLS]",
        "[TOOL_",
        "CALLS]",
    ),
    *("[ARGS]", "[CALL_ID]", "[CALL", "ab12", "<think>", "</think>", "<think", "</", "[THINK]", "[/THINK]", "<", "["),
    *('{"name": "weather", "arguments": {"city": "Oslo"}}', '{"name": "f", "parameters": {}}', '{"arguments": {}, '),
    *('{"name": "weather", "arguments": {"text": "</tool_call> \\" } ] \\u00e9 [ARGS]"}}', '"name": "f"}', '{"name": '),
    *('"weather"', '"stranger"', '"f"', ', "arguments": ', ', "parameters": ', '{"a": [1, {"b": null}], "c": -1.5e3}'),
    *(
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": 01}',
        '{"a": tru}',
        '"\\x"',
        '"\\u12',
        "\x00",
        "\x1f",
        '"type": "function"',
    ),
    *('"\\ud83d"', '"\\ud83d\\ude00"', "\\ude00", "\\u0000", '{"a": 1e999}', '{"a": -1E+400}', "1e99", "9"),
    *("{", "}", "}}", "]", ",", ":", ";", "; ", '"', "\\", "{}", "[{", "}]", "weather", "get-time", "f", "weath"),
    *(" ", "\n", "\n\n", "\t", "\r\n", "Hello", " world", "é", "日本", "\U0001f600", "\u2028", "\u00a0"),
    *("```json\n", "```", "\n```\n", "``", "`", "\n{", "\n[", '\n{"name": "get-time", "arguments": {"a": "b"}}'),
)

SOUND_ARGUMENTS = (
    *('{"city": "Oslo"}', "{}", '{"a": {"b": ["}", "\\"]", 1]}}', '{"text": "</tool_call>"}'),
    *('{"a": "\\uD83D\\uDE00", "b": -1.5e-400}', '{"a": "\\\\u0000 \\\\ud83d"}', '{"a": 1e308, "b": [true, null]}'),
)
ODD_ARGUMENTS = (  # JSON by the grammar of JSON, and yet not every reader takes it
    *('{"a": "\\ud83d"}', '{"a": "\\ude00 \\uD83D\\ud83d\\uDE00"}', '{"\\ud83d": 1}', '{"a": ["\\ud83dx", "\\u0000"]}'),
    *('{"a": 1e999}', '{"a": [-1E+400, 1e400]}', '{"a": ' + "9" * 4301 + "}", '{"a": 0.' + "1" * 4301 + "}"),
)


def hostile_text(rng: random.Random) -> str:
    """Pieces of calls, markers and prose in no good order."""
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(0, 30)))


def nearly_right_text(rng: random.Random, form: str) -> str:
    """Calls and prose in good order, with a few characters lost, doubled or replaced."""
    around = ["Hello", "\n", " ; ", "", "\n```\n", "```json\n", written_call(rng, "json")]
    text = "".join(rng.choice([written_call(rng, form), *around]) for _ in range(rng.randint(1, 5)))
    for _ in range(rng.randint(0, 2)):
        at = rng.randint(0, max(0, len(text) - 1))
        text = text[:at] + rng.choice(["", text[at : at + 1] * 2, rng.choice(FRAGMENTS)]) + text[at + 1 :]
    return text


def written_call(rng: random.Random, form: str) -> str:
    """One call as a model writes it."""
    name = rng.choice([*TOOLS, "stranger"])
    arguments = rng.choice([*SOUND_ARGUMENTS, *ODD_ARGUMENTS])
    key = "parameters" if form == "llama3" else "arguments"
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    match form.partition("+")[0]:
        case "hermes":
            return f"<tool_call>\n{call}\n</tool_call>"
        case "mistral":
            return rng.choice([f"[TOOL_CALLS][{call}]", f"[TOOL_CALLS]{name}[ARGS]{arguments}"])
        case "llama3":
            return rng.choice([call, f"<|python_tag|>{call}"])
        case _:
            return rng.choice([call, f"[{call}, {call}]"])


def cut(rng: random.Random, text: str) -> list[str]:
    """The text in random pieces, some of them empty."""
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, min(40, 2 * len(text) + 1))))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_pieces(
    pieces: list[str], form: OutputFormat, around: AnswerContext | None = None, tools: Collection[str] = TOOLS
) -> ParsedOutput:
    """What a stream makes of the pieces."""
    stream = OutputStream(form, tools, around)
    deltas = [*(delta for piece in pieces for delta in stream.push(piece)), *stream.end()]
    return joined(deltas, is_cut=stream.is_cut)


def told(
    pieces: list[str], form: OutputFormat, around: AnswerContext | None = None, tools: Collection[str] = TOOLS
) -> list[Delta]:
    stream = OutputStream(form, tools, around)
    return [*(delta for piece in pieces for delta in stream.push(piece)), *stream.end()]


def parse_output(
    text: str, form: OutputFormat, tools: Collection[str] = (), context: AnswerContext | None = None
) -> ParsedOutput:
    """The parts of a whole answer."""
    return OutputStream(form, tools, context).parse(text)
