"""`kvarn fill`: the slots of a template, or the values of a JSON schema, filled in at once by a diffusion model."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvarn.cli.generate.diffusion_options import diffusion_params
from kvarn.cli.terminal.options import EngineOptions, Model, open_llm, stats_line
from kvarn.cli.terminal.text import read_prompt, require_utf8

DEFAULT_MODEL = "tiny-diffusion"


def fill(
    template: Annotated[
        str,
        typer.Argument(help="Text with slots, as '{{name}} lives in {{city}}.', or a JSON schema; - reads stdin."),
    ],
    *,
    model: Model = DEFAULT_MODEL,
    slot: Annotated[
        list[str],
        typer.Option(
            "--slot",
            metavar="NAME=RULE",
            help="What a slot takes: NAME=/REGEX/, NAME=one|of|these, or NAME=12 for room of 12 tokens; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer reads the default and never changes it
    prompt: Annotated[str, typer.Option(help="What stands before the template.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    diffusion: Annotated[
        list[str], typer.Option("--diffusion", metavar="NAME=VALUE", help="How the model denoises; repeatable.")
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print text and values as one JSON object.")] = False,
    engine: EngineOptions,
) -> None:
    """Fill the slots of a template: what stands around them stays as it is, and the model sees both sides."""
    from kvarn.types import SamplingParams

    text = read_prompt(template)
    slots = dict(_slot(one) for one in slot)
    params = SamplingParams(
        temperature=temperature, seed=seed, diffusion=diffusion_params(diffusion, wants_events=False)
    )
    with open_llm(model, engine) as llm:
        filled = llm.fill(_schema(text) or text, slots, prompt=require_utf8(prompt, "--prompt"), params=params)
    values = dict(filled.values)
    print(json.dumps({"text": filled.text, "values": values}, ensure_ascii=False) if as_json else filled.text)
    print(stats_line(filled.completion), file=sys.stderr)


def _schema(text: str) -> dict[str, Any] | None:
    """The template as a JSON schema; None: it is text with slots."""
    if not text.lstrip().startswith("{") or "{{" in text:
        return None
    try:
        schema = json.loads(text)
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None


def _slot(given: str) -> tuple[str, Any]:
    from kvarn.fill import Slot

    name, sign, rule = given.partition("=")
    if not sign or not rule:
        raise typer.BadParameter(f"--slot {given!r:.60}; write it as NAME=/REGEX/, NAME=one|of|these or NAME=12")
    if rule.isascii() and rule.isdigit():
        return name, Slot(max_tokens=int(rule[:9]))
    if len(rule) > 2 and rule[0] == rule[-1] == "/":
        return name, Slot(regex=rule[1:-1])
    return name, Slot(choices=tuple(rule.split("|")))
