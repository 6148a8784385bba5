"""The fields that chat and text completions share: how tokens are chosen, when to stop, what to return."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvarn.server.api.diffusion_schema import DiffusionBody
from kvarn.server.api.schema import Answer, Body
from kvarn.types import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_PRIORITY, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

INT31 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
DecimalId = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Breaker = Annotated[str, Field(min_length=1, max_length=40)]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    INERT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    include_usage: bool | None = Field(None, description="A last chunk with the number of tokens")
    continuous_usage_stats: bool | None = Field(None, description="The number of tokens so far in every chunk")


class LoraFactor(Body):
    """One adapter of a request and what it is multiplied by, as llama-server has it."""

    id: int = Field(ge=0, le=INT31, description="Of /lora-adapters")
    scale: float = Field(ge=-1000, le=1000)


LoraFactors = Annotated[list[LoraFactor], Field(max_length=8)]


def lora_factors(given: list[LoraFactor] | None) -> dict[int, float] | None:
    """What each adapter is multiplied by; of one that is named twice, the last."""
    return None if given is None else {one.id: one.scale for one in given}


class SamplingBody(Body):
    """Everything but the prompt. null is the same as leaving a field out."""

    model: str = Field(description="An id of /v1/models")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Independent answers to one prompt")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; default: what the model recommends")
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[DecimalId, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Same seed, same answer")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    # Beyond OpenAI:
    top_k: int | None = Field(None, ge=0, le=INT31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="llama.cpp's name of repetition_penalty")
    penalty_window: int | None = Field(None, ge=1, le=INT31)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, le=1000)
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=MAX_STOP_STRINGS)] | None = None
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=INT31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    truncate: Literal["left"] | None = Field(None, description="Drop the oldest prompt tokens that do not fit")
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Clamped to what the key may")
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="Shares cached prefixes with itself")
    speculate: bool | None = Field(None, description="false: no guessed tokens, one at a time")
    lora: LoraFactors | None = Field(
        None, description="Adapters in place of the one that model names; an empty list is the base"
    )
    diffusion: DiffusionBody | None = Field(None, description="How a diffusion model denoises")
    guided_json: dict[str, Any] | Annotated[str, Field(min_length=1)] | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1, description="Lark, as llguidance reads it")


class PromptTokensDetails(Answer):
    """Where the prompt came from."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Tokens of a prediction that were computed ahead: right ones are in the answer, wrong ones are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(Answer):
    """Tokens read and written; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
