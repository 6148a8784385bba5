"""Bodies of /v1/chat/completions and /v1/completions as conversations and sampling parameters. Pure functions.

The other dialects translate their bodies to a ChatBody, so that all conversations are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.diffusion import DiffusionParams
from kvarn.errors import InvalidParameter
from kvarn.server.api.diffusion_schema import DiffusionBody
from kvarn.server.api.openai.chat_schema import ChatBody, JsonObjectFormat, NamedTool, SchemaFormat
from kvarn.server.api.openai.completions_schema import CompletionBody
from kvarn.server.api.openai.sampling_schema import SamplingBody
from kvarn.server.api.schema import InvalidField, field_at_fault
from kvarn.server.chat.conversation import Conversation
from kvarn.server.chat.generation_plan import RequestOptions
from kvarn.server.chat.output.tools import NamedFunction, ToolChoice, check_choice, check_tools
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema, Regex
from kvarn.types import SamplingParams

GUIDED = ("guided_json", "guided_regex", "guided_grammar")
DEFAULT_TEXT_TOKENS = 16  # of a text completion without max_tokens, as at OpenAI

# Fields that mean the same in a body and in SamplingParams.
_SAME = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p"),
    *("typical_p", "repetition_penalty", "penalty_window", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("prompt_logprobs", "truncate", "speculate"),
)


def options_of(body: SamplingBody) -> RequestOptions:
    """Priority, cache salt and the name of the length limit."""
    is_newer = isinstance(body, ChatBody) and body.max_tokens is None
    return RequestOptions(body.priority, body.cache_salt or "", "max_completion_tokens" if is_newer else "max_tokens")


def conversation_of(body: ChatBody, max_n: int) -> Conversation:
    """A chat body, checked as far as no model is needed."""
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options is given without stream; set stream to true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidField("prompt_logprobs do not come in streams; set stream to false", "prompt_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    _check_tool_results(body)
    tools, choice = _tools(body)
    constraint = _constraint(body)
    if tools and choice != "auto" and constraint_field(body) is None:
        constraint = None  # the answer is a call, so there is no text that response_format could speak of
    if tools and constraint_field(body) is not None:
        raise InvalidField(
            "tools and guided_* exclude each other: an answer that must follow a constraint cannot be a call; set "
            'tool_choice to "none", leave one of them out, or use response_format',
            "tools",
            mentions=("guided_*", "response_format"),
        )
    params = _params(
        body,
        max_n,
        max_tokens=_max_tokens(body),
        constraint=constraint,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=None if body.prediction is None else body.prediction.text,
    )
    messages = [message.model_dump(exclude_none=True, exclude_unset=True) for message in body.messages]
    return Conversation(
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=choice,
        is_parallel=body.parallel_tool_calls is not False,
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        constrained_by="response_format" if isinstance(body.response_format, SchemaFormat) else constraint_field(body),
    )


def text_params(body: CompletionBody, max_n: int) -> SamplingParams:
    """The parameters of a text completion."""
    if body.stream_options is not None and not body.stream:
        raise InvalidField("stream_options is given without stream; set stream to true", "stream_options")
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        raise InvalidField("logprobs of the prompt do not come in streams; set stream to false", "stream")
    if body.suffix:
        _check_suffix(body)
    max_tokens = DEFAULT_TEXT_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidField("max_tokens is 0; give at least 1, or set echo to get the prompt only", "max_tokens")
    scores = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scores = max(body.logprobs, scores or 0)
    return _params(
        body,
        max_n,
        max_tokens=max(max_tokens, 1),
        prefill_only=max_tokens == 0,
        constraint=_guided(body),
        logprobs=body.logprobs,
        prompt_logprobs=scores,
    )


def _check_suffix(body: CompletionBody) -> None:
    """What makes no sense for a text between two others."""
    for name in ("echo", "parse_special"):
        if getattr(body, name):
            raise InvalidField(f"suffix and {name} exclude each other; leave one of them out", name)


def _params(body: SamplingBody, max_n: int, **more: Any) -> SamplingParams:
    if body.n is not None and body.n > max_n:
        raise InvalidField(f"n is {body.n}; this server gives at most {max_n} answers", "n")
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    named_twice = body.repeat_penalty  # llama.cpp's name, which Open WebUI and others send
    if named_twice is not None and given.setdefault("repetition_penalty", named_twice) != named_twice:
        raise InvalidField("repeat_penalty and repetition_penalty are two names of one; give one", "repeat_penalty")
    if body.logit_bias is not None:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    if body.diffusion is not None:
        given["diffusion"] = _diffusion(body.diffusion, is_stream=bool(body.stream))
    return SamplingParams(**{**given, **{name: value for name, value in more.items() if value is not None}})


def _diffusion(body: DiffusionBody, *, is_stream: bool) -> DiffusionParams:
    if body.events and not is_stream:
        raise InvalidField("diffusion.events come in streams only; set stream to true", "diffusion.events")
    try:
        return body.params()
    except InvalidParameter as error:
        raise InvalidField(f"diffusion: {error}", "diffusion") from None


def _max_tokens(body: ChatBody) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidField(
            f"max_tokens is {older} and max_completion_tokens {newer}; give one of them", "max_completion_tokens"
        )
    return newer if older is None else older


def _tools(body: ChatBody) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """The tools the model may call, and whether it must call one, or which; checked in full by OutputPlan."""
    tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ())
    choice = (
        NamedFunction(body.tool_choice.function.name) if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    )
    check_choice(check_tools(tools), choice or "auto")
    return ((), "none") if not tools or choice == "none" else (tools, choice or "auto")


def _check_tool_results(body: ChatBody) -> None:
    """A result answers a call that was made before it."""
    called: set[str] = set()
    for index, message in enumerate(body.messages):
        if message.role == "assistant":
            called.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in called:
            raise InvalidField(
                f"messages.{index} is the result of a call that no assistant message before it has",
                f"messages.{index}.tool_call_id",
            )


def _constraint(body: ChatBody) -> Constraint | None:
    wanted = body.response_format
    guided = _guided(body)
    if guided is not None and isinstance(wanted, JsonObjectFormat | SchemaFormat):
        raise InvalidField("response_format and guided_* are both given; give one of them", "response_format")
    if isinstance(wanted, JsonObjectFormat):
        return JsonSchema()
    if isinstance(wanted, SchemaFormat):
        with field_at_fault("response_format"):
            return JsonSchema(wanted.json_schema.schema_)
    return guided


def constraint_field(body: SamplingBody) -> str | None:
    """Which of the guided_* fields is given."""
    return next((name for name in GUIDED if getattr(body, name) is not None), None)


def _guided(body: SamplingBody) -> Constraint | None:
    given = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidField(f"{' and '.join(given)} are both given; give one of them", list(given)[1])
    ((name, value),) = given.items()
    kinds: Mapping[str, Callable[[Any], Constraint]] = {
        "guided_json": JsonSchema,
        "guided_regex": Regex,
        "guided_grammar": Grammar,
    }
    with field_at_fault(name):
        return kinds[name](value)
