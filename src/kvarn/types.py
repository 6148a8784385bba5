"""The values a caller passes in and gets back. Frozen; validated when made. Knows no model and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from kvarn.checks import check_parameter, short, utf8
from kvarn.citations.types import Citation, SentenceSupport
from kvarn.diffusion import CanvasView, DiffusionParams
from kvarn.errors import InvalidParameter
from kvarn.structured.constraints import Constraint

Message = Mapping[str, Any]  # {"role": ..., "content": ...} as in the OpenAI API

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 300
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PRIORITY = 100


class FinishReason(StrEnum):
    """Why a request ended; every request ends in exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    None for temperature, top_k, top_p, min_p or repetition_penalty means: what the model's metadata
    recommends, else temperature 0.7, top_p 0.95 and the others off. temperature=0.0 is greedy.
    """

    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn at random and reported in Completion.seed
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # independent answers to one prompt, which is computed once
    logprobs: int | None = None  # alternatives beside each chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for the prompt; computed anew, without cached blocks
    penalty_window: int | None = None  # penalties look at this many last tokens; None: all of prompt and answer
    dry_multiplier: float = 0.0  # 0: off; penalises tokens that would continue a repeated run
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0  # 0: off; how often XTC drops all tokens above xtc_threshold but the last
    xtc_threshold: float = 0.1
    sampler: str | None = None  # replaces the filters above; registered with kvarn.register_sampler
    constraint: Constraint | None = None  # kvarn.JsonSchema, Regex or Grammar that the answer follows
    priority: int = 0  # higher runs first
    deadline_s: float | None = None  # ended with FinishReason.DEADLINE this long after submission
    slo_ms: float | None = None  # target time to the first token, for policy="slo"
    reuse_cache: bool = True  # start from cached blocks of an equal prefix
    free_cache_on_finish: bool = False  # leave none of its blocks in the prefix cache
    keep_cache: bool = False  # evict its prompt's blocks after those of others, up to a quarter of the prefix cache
    prefill_only: bool = False  # compute the prompt into the prefix cache, sample no token
    diffusion: DiffusionParams | None = None  # how a diffusion model denoises; refused by other models
    prediction: str | None = None  # the answer that is expected: it comes faster where it comes so; never changed by it
    speculate: bool = True  # where the engine does; False: one token a step
    truncate: str | None = None  # "left": drop the oldest prompt tokens that do not fit, instead of refusing

    def __post_init__(self) -> None:
        self._check_ranges()
        for name in ("reuse_cache", "free_cache_on_finish", "keep_cache", "prefill_only", "ignore_eos", "speculate"):
            check_parameter.flag(name, getattr(self, name))
        check_parameter.instance("diffusion", self.diffusion, DiffusionParams, "a kvarn.DiffusionParams", optional=True)
        check_parameter.instance("sampler", self.sampler, str, "the name of a registered one", optional=True)
        check_parameter.instance("prediction", self.prediction, str, "a string", optional=True)
        utf8("prediction", self.prediction or "")
        check_parameter.one_of("truncate", self.truncate, ("left",), optional=True)
        if self.constraint is not None:
            _check_constraint(self.constraint, ignore_eos=self.ignore_eos)
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", field="min_tokens"
            )

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed, validated again."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)

    def _check_ranges(self) -> None:
        check_parameter.integer("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        check_parameter.integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        check_parameter.number("temperature", self.temperature, 0.0, 100.0, optional=True)
        check_parameter.integer("top_k", self.top_k, 0, 2**31 - 1, optional=True)
        check_parameter.number("top_p", self.top_p, 0.0, 1.0, optional=True)
        check_parameter.number("min_p", self.min_p, 0.0, 1.0, optional=True)
        check_parameter.number("typical_p", self.typical_p, 0.0, 1.0)
        check_parameter.number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, optional=True)
        check_parameter.number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_parameter.number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_parameter.integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        check_parameter.integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        check_parameter.integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        check_parameter.integer("n", self.n, 1, MAX_CHOICES)
        check_parameter.integer("penalty_window", self.penalty_window, 1, 2**31 - 1, optional=True)
        check_parameter.number("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        check_parameter.number("dry_base", self.dry_base, 1.0, 100.0)
        check_parameter.integer("dry_allowed_length", self.dry_allowed_length, 1, 1000)
        check_parameter.number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        check_parameter.number("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        check_parameter.integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_parameter.number("deadline_s", self.deadline_s, 0.0, 1e7, optional=True)
        check_parameter.number("slo_ms", self.slo_ms, 0.0, 1e9, optional=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request had; cached ones were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0  # of the prediction: computed ahead and right ...
    rejected_prediction_tokens: int = 0  # ... or wrong

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds, from submission."""

    queue_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float
    num_first: int = 1  # tokens that came together with the first: a block of a diffusion model

    def tokens_per_s(self, num_tokens: int) -> float:
        """Decode speed: tokens after the first, over the time they took; of blocks, all of them from the start."""
        if self.num_first > 1:
            return num_tokens / max(self.prefill_s + self.decode_s, 1e-9)
        return (num_tokens - 1) / self.decode_s if num_tokens > 1 and self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability before bias, penalties and temperature, and the most probable ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    entropy: float | None = None  # nats, of the whole distribution; None for tokens of a prompt


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes five times as long
class TokenEvent:
    """One step of a stream. text is what became certain with this token, and may be empty."""

    text: str
    token_id: int | None  # None: text held back for stop strings, flushed at the end
    index: int  # of the token in the completion
    finish_reason: FinishReason | None = None  # set on the last event only
    logprob: TokenLogprob | None = None
    completion: Completion | None = None  # the whole result of this choice, on its last event only
    request_id: str = ""
    choice: int = 0  # which of the n answers
    canvas: CanvasView | None = None  # set on events without text: a diffusion step, for diffusion.events
    num_more: int = 0  # tokens told of before token_id: only in a server that is behind


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. token_ids has every chosen token, the end or stop token included; text has no stop text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    stop_match: str | int | None = None  # the stop string or token id that ended it
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # one per prompt token after the first
    alternatives: tuple[Completion, ...] = ()  # choices 1 .. n - 1, in order
    citations: tuple[Citation, ...] = ()  # the sources of a chat with retrieve=, in the order of their numbers
    sentences: tuple[SentenceSupport, ...] = ()  # of a chat with retrieve=: those that say something, in order


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InvalidParameter(f"stop is {short(stop)}; give a string or a list of strings", field="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidParameter(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop")
    for string in strings:
        num_bytes = len(utf8("stop", string))
        if not 1 <= num_bytes <= MAX_STOP_BYTES:
            raise InvalidParameter(
                f"stop has a string of {num_bytes:,} bytes; give 1 to {MAX_STOP_BYTES}", field="stop"
            )
    return tuple(strings)


def _breakers(breakers: object) -> tuple[str, ...]:
    if not isinstance(breakers, list | tuple) or not all(isinstance(b, str) and 0 < len(b) <= 40 for b in breakers):
        raise InvalidParameter(
            f"dry_sequence_breakers is {short(breakers)}; give a list of short strings", field="dry_sequence_breakers"
        )
    if len(breakers) > MAX_STOP_STRINGS:
        raise InvalidParameter(
            f"dry_sequence_breakers has {len(breakers)} strings; at most {MAX_STOP_STRINGS}",
            field="dry_sequence_breakers",
        )
    utf8("dry_sequence_breakers", "".join(breakers))
    return tuple(breakers)


def _check_constraint(constraint: object, *, ignore_eos: bool) -> None:
    if not isinstance(constraint, Constraint):
        raise InvalidParameter(
            f"constraint is {short(constraint)}; give a kvarn.JsonSchema, Regex or Grammar", field="constraint"
        )
    if ignore_eos:
        raise InvalidParameter(
            "ignore_eos and constraint contradict each other: an answer ends where it is complete", field="ignore_eos"
        )


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple):
        raise InvalidParameter(f"{name} is {short(ids)}; give a list of token ids", field=name)
    for token_id in ids:
        check_parameter.integer(f"an entry of {name}", token_id, 0, 2**31 - 1)
    return tuple(ids)


def _logit_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameter(f"logit_bias is {short(bias)}; give a mapping of token id to bias", field="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidParameter(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", field="logit_bias"
        )
    for token_id, value in bias.items():
        check_parameter.integer("a token id of logit_bias", token_id, 0, 2**31 - 1)
        check_parameter.number(f"logit_bias of token {token_id}", value, -100.0, 100.0)
    return dict(bias)
