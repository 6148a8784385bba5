"""`kvarn run`: one prompt, one answer, streamed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.generate.canvas_view import watch_canvas
from kvarn.cli.generate.diffusion_options import diffusion_params
from kvarn.cli.terminal.options import (
    EngineOptions,
    Lora,
    Model,
    SamplingOptions,
    System,
    load_lora,
    open_llm,
    stats_line,
)
from kvarn.cli.terminal.text import Writer, read_prompt, require_utf8
from kvarn.config import DEFAULT_MODEL
from kvarn.errors import InvalidParameter, TemplateError
from kvarn.models.spec import MaskedDiffusion
from kvarn.tokenizer.fim import Infill
from kvarn.types import Completion, SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.client import EventStream
    from kvarn.llm import LLM

Asked = str | list[dict[str, str]] | Infill


def run(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads stdin.")],
    *,
    model: Model = DEFAULT_MODEL,
    system: System = None,
    lora: Lora = None,
    sampling: SamplingOptions,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    suffix: Annotated[
        str | None, typer.Option(help="Write what fits between the prompt and this text; without the chat template.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show how a diffusion model fills in its answer.")] = False,
    diffusion: Annotated[
        list[str], typer.Option("--diffusion", metavar="NAME=VALUE", help="How a diffusion model denoises; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default and never changes it
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is done.")] = False,
    engine: EngineOptions,
) -> None:
    """Answer one prompt. Text goes to stdout as it comes, speed to stderr."""
    if (raw or suffix is not None) and system is not None:
        other = "--raw leaves" if suffix is None else "--suffix leaves"
        raise typer.BadParameter(f"--system is part of the chat template, which {other} out; drop one of them")
    if watch and as_json:
        raise typer.BadParameter("--watch shows the answer on the way, --json only at its end; drop one of them")
    params = sampling.params().replace(diffusion=diffusion_params(diffusion, wants_events=watch))
    text = read_prompt(prompt)
    if suffix is not None:
        request: Asked = Infill(text, require_utf8(suffix, "--suffix"))
    else:
        request = text if raw else _messages(text, system)
    with open_llm(model, engine) as llm:
        adapter = load_lora(llm, lora)
        if isinstance(request, Infill) and isinstance(llm.spec.generation, MaskedDiffusion):
            completion = _fill_in(llm, request, params, adapter, as_json=as_json)
        else:
            with _stream(llm, request, params, adapter) as events:
                completion = _shown(events, llm, watch=watch, as_json=as_json)
    print(stats_line(completion), file=sys.stderr)


def _shown(events: EventStream, llm: LLM, *, watch: bool, as_json: bool) -> Completion:
    if watch:
        return watch_canvas(events, llm.tokenizer)
    if not as_json:
        return _print_text(events)
    completion = events.completion()
    _print_json(completion, llm.spec.name)
    return completion


def _fill_in(llm: LLM, infill: Infill, params: SamplingParams, lora: str | None, *, as_json: bool) -> Completion:
    """What fits between two texts, from a diffusion model: all of it comes at once."""
    if params.diffusion is not None and params.diffusion.events:
        raise InvalidParameter(
            "--watch shows a whole canvas, and --suffix asks for a part of one; drop one of them", field="watch"
        )
    submission, read = llm.submissions.of_middle(infill, params, llm.context, lora=lora)
    completion = read(llm.client.complete([submission])[0])
    if as_json:
        _print_json(completion, llm.spec.name)
    else:
        _print_whole(completion)
    return completion


def _stream(llm: LLM, request: Asked, params: SamplingParams, lora: str | None) -> EventStream:
    if isinstance(request, list) and llm.tokenizer.chat_template is None:
        raise TemplateError("the model has no chat template; add --raw: it continues your text as it is")
    if not isinstance(request, Infill):
        return llm.stream(request, params, lora=lora)
    from kvarn.engine.client import EventStream

    return EventStream(llm.client.submit(llm.submissions.of_infill(request, params, llm.context, lora=lora)))


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": require_utf8(system, "--system")})
    return messages


def _print_text(events: EventStream) -> Completion:
    writer = Writer()
    for event in events:
        writer.write(event.text)
        if event.completion is not None:
            writer.end_line()
            return event.completion
    raise AssertionError("a stream ends with a completion")


def _print_whole(completion: Completion) -> None:
    writer = Writer()
    writer.write(completion.text)
    writer.end_line()


def _print_json(completion: Completion, model: str) -> None:
    import json

    print(json.dumps(as_object(completion, model), ensure_ascii=False))


def as_object(completion: Completion, model: str) -> dict[str, Any]:
    """A completion as plain JSON values."""
    usage, timings = completion.usage, completion.timings
    return {
        "model": model,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "stop_match": completion.stop_match,
        "seed": completion.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "queue_s": timings.queue_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "first_token_s": timings.first_token_s,
            "tokens_per_s": timings.tokens_per_s(usage.completion_tokens),
        },
    }
