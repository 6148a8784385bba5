"""Body and answer of /infill, by the names llama-server has for them.

What changes an answer and cannot be done here is a field with one accepted value, the one that turns it off.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from kvarn.server.api.openai.sampling_schema import INT31, Breaker, LoraFactors, StopString, TokenId, TopLogprobs
from kvarn.server.api.schema import Answer, BadItem, Body
from kvarn.types import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS

MAX_FILES = 1024
MAX_NAME = 4096  # characters of a path
MAX_BIASED_TEXT = 256  # characters, of which each token is biased
MAX_RESPONSE_FIELDS = 64
SAMPLERS = {  # by their letters in a text
    **{"d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p", "t": "temperature"},
    **{"x": "xtc", "i": "infill", "e": "penalties", "a": "adaptive_p"},
}
Biases = list[tuple[int | str, float]]


def _off(value: float) -> float:
    if value > 0:
        raise ValueError("there is no such sampler here; leave it out or give 0, which turns it off")
    return value


def _least_one(value: int) -> int:
    if value > 1:
        raise ValueError("samplers keep one token at least here, never more; leave it out or give 0")
    return value


def _false(value: bool) -> bool:
    if value:
        raise ValueError("it is not supported here; leave it out or give false")
    return value


def _biases(given: Any) -> Biases | None:
    """[[token, bias], ...] or {token: bias}; a token is an id or a text, false as a bias bans it."""
    if given is None:
        return None
    pairs = {token: [_key(token), bias] for token, bias in given.items()} if isinstance(given, dict) else given
    if not isinstance(pairs, list | dict) or len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"give at most {MAX_LOGIT_BIAS} pairs of a token and its bias")
    return [_bias(*pair) for pair in (pairs.items() if isinstance(pairs, dict) else enumerate(pairs))]


def _bias(at: str | int, pair: object) -> tuple[int | str, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadItem("give pairs of a token and its bias", at)
    token, bias = pair
    if bias is False:
        bias = -100.0
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
    is_id = isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= INT31
    if not is_number or not (is_id or (isinstance(token, str) and 0 < len(token) <= MAX_BIASED_TEXT)):
        raise BadItem(
            f"a token is an id or a text of up to {MAX_BIASED_TEXT} characters, a bias a number from -100 to 100, or "
            "false to ban the token",
            at,
        )
    return token, float(bias)


def _key(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text


def _samplers(given: Any) -> list[str] | None:
    if given is None:
        return None
    names = [SAMPLERS.get(letter, letter) for letter in given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("give a list of names, or their letters as one text")
    if len(names) > len(SAMPLERS) or not set(names) <= set(SAMPLERS.values()):
        raise ValueError(f"give each at most once, of {', '.join(SAMPLERS.values())}")
    return names


_PAIR = {
    "type": "array",
    "items": {"type": ["integer", "string", "number", "boolean"]},
    "minItems": 2,
    "maxItems": 2,
    "description": "A token's id or a text, and its bias or false",
}
_BIAS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": _PAIR, "maxItems": MAX_LOGIT_BIAS},
        {"type": "object", "additionalProperties": {"type": ["number", "boolean"]}, "maxProperties": MAX_LOGIT_BIAS},
        {"type": "null"},
    ]
}
_NAMES = {"type": "array", "items": {"enum": list(SAMPLERS.values())}, "maxItems": len(SAMPLERS)}
_SAMPLERS_SCHEMA = {"anyOf": [_NAMES, {"type": "string"}, {"type": "null"}]}
Off = Annotated[float, AfterValidator(_off), Field(description="Not supported: 0 or less")]
LeastOne = Annotated[int, AfterValidator(_least_one), Field(description="More than 1 is not supported")]
Never = Annotated[bool, AfterValidator(_false), Field(description="Not supported: false")]


class InfillFile(Body):
    """A file or a part of one that the model may look at."""

    INERT: ClassVar[frozenset[str]] = frozenset({"time"})
    text: str
    filename: str | None = Field(None, max_length=MAX_NAME)


class InfillBody(Body):
    """Two texts, and what else is known of the project. What steers llama-server's own machinery has no effect."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"adaptive_decay", "backend_sampling", "cache_prompt", "dynatemp_exponent", "id_slot", "mirostat_eta"}
        | {"mirostat_tau", "n_cache_reuse", "n_discard", "n_keep", "return_progress", "stream_options"}
        | {"t_max_prompt_ms", "timings_per_token"}  # the former has no effect in llama-server, too
        | {f"speculative.{name}" for name in ("n_max", "n_min", "p_min", "type")}
        | {f"speculative.{name}" for name in ("ngram_size_n", "ngram_size_m", "ngram_m_hits")}
        | {"penalize_nl", "tfs_z"}  # which llama-server had once
    )
    model: str | None = Field(None, description="An id of /v1/models; default: the first model")
    input_prefix: str = Field("", description="What stands before")
    input_suffix: str = Field("", description="What stands after")
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES)] | None = Field(
        None, description="Other files; of more than fits, the last ones are kept"
    )
    prompt: str | None = Field(None, description="Follows input_prefix")
    n_predict: int | None = Field(None, ge=-1, le=INT31, description="-1: until the end; 0: only read the prompt")
    max_tokens: int | None = Field(None, ge=-1, le=INT31, description="Without n_predict")
    n_cmpl: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Several answers, as a list")
    stream: bool | None = None
    n_indent: int | None = Field(None, ge=0, le=INT31, description="Ends at a later line that is indented less")
    t_max_predict_ms: int | None = Field(None, ge=-1, le=INT31, description="Ends at the first new line after this")
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=INT31, description="0 and -1: all")
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=INT31, description="0: no penalties; -1: of all tokens")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, le=1000)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=INT31, description="0: no DRY; -1: over all tokens")
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=MAX_STOP_STRINGS)] | None = None
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    samplers: Annotated[Any, PlainValidator(_samplers), WithJsonSchema(_SAMPLERS_SCHEMA)] = Field(
        None, description="Those that are not named are off; the order is always the same, and infill has no effect"
    )
    logit_bias: Annotated[Any, PlainValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)] = None  # Biases
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description="-1: another one each time")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    n_probs: TopLogprobs | None = Field(None, description="So many of the most probable tokens beside each one")
    return_tokens: bool | None = Field(None, description="The ids of the answer's tokens")
    response_fields: Annotated[list[str], Field(max_length=MAX_RESPONSE_FIELDS)] | None = Field(
        None, description="The answer consists of these only, such as timings/prompt_n"
    )
    grammar: str | None = Field(None, description="GBNF, or Lark that begins with %llguidance")
    json_schema: dict[str, Any] | None = None
    grammar_lazy: Never | None = None
    post_sampling_probs: Never | None = None
    lora: LoraFactors | None = Field(
        None, description="Adapters by the ids of /lora-adapters; an empty list is the base"
    )
    mirostat: Off | None = None
    top_n_sigma: Off | None = None
    dynatemp_range: Off | None = None
    adaptive_target: Off | None = None
    min_keep: LeastOne | None = None

    @property
    def max_answer(self) -> int | None:
        """How many tokens are wanted, None for as many as there are; 0: only read the prompt."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        return None if wanted == -1 else wanted


class InfillTimings(Answer):
    """How long it took, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(Answer):
    """The text between. In a stream, every event but the last has index, content and stop only."""

    index: int
    content: str
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: Literal["eos", "word", "limit", "none"]
    stopping_word: str
    timings: InfillTimings
