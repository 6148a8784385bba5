"""What a body calls a parameter of the engine: an error below the server is told by the name that the client sent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from kvarn.server.api.schema import Body

GivenFields = frozenset[str]  # dotted names: max_tokens, diffusion, diffusion.steps, ...
NO_FIELDS: GivenFields = frozenset()
# What the model reads, of which a body has at least one.
TEXTS = ("messages", "prompt", "input", "input_prefix", "documents", "query", "tokens")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
CONSTRAINTS = (
    *("guided_json", "guided_regex", "guided_grammar", "response_format", "grammar", "json_schema"),
    *("text", "output_config"),
)
IN_PATHS = frozenset({"name"})  # parameters that a path may have
# Names to look for, the parameter's own first. What a client left out is the fault of its text: that is too long, ...
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("prompt", "text", "texts", "messages", "tokens", "documents"), TEXTS),
        **dict.fromkeys(("id", "source", "kind", "metadata"), ("documents",)),
        "constraint": CONSTRAINTS,
        "logprobs": ("logprobs", "top_logprobs", "n_probs"),
        "max_tokens": (*LIMITS, *TEXTS),
        "model": ("model", "rerank"),
        "n": ("n", "n_cmpl", *TEXTS),
        "penalty_window": ("penalty_window", "repeat_last_n", "dry_penalty_last_n"),
        "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
        "stop": ("stop", "stop_sequences"),
    }
)


def given_fields(body: Body, prefix: str = "") -> GivenFields:
    """The names of all fields of a body that are not left out, those of the objects in it included."""
    names, shown = set(), _shown_names(type(body))
    for name, value in body.__dict__.items():
        if value is None:
            continue
        names.add(prefix + shown[name])
        if isinstance(value, Body):
            names |= given_fields(value, f"{prefix}{name}.")
    return frozenset(names)


@cache
def _shown_names(model: type[Body]) -> Mapping[str, str]:
    """What clients call each field."""
    return {name: field.alias or name for name, field in model.model_fields.items()}


def field_of(parameter: str, given: GivenFields) -> str | None:
    """The field that a parameter came from; itself where there was no body, None where no field has to do with it."""
    if not given:
        return parameter
    names = NAMES.get(parameter, (parameter,))
    nested = (name for name in sorted(given) if name.endswith(f".{parameter}"))
    otherwise = parameter if parameter in IN_PATHS else None
    return next((name for name in names if name in given), next(nested, otherwise))


def told_of(message: str, parameter: str | None, field: str | None) -> str:
    """A message with the field's name in the place of the parameter's, unless that may be a plain word there."""
    if parameter is None or field is None or field in TEXTS:
        return message
    is_name = "_" in parameter or message.startswith(f"{parameter} ")
    return message.replace(parameter, field, 1) if is_name else message
