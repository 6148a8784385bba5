"""Body and answer of /infill, by the names llama-server has for them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvarn.errors import InvalidParameter
from kvarn.server.api.openai.sampling_schema import INT31, StopString, TokenId
from kvarn.server.api.schema import Answer, Body, InvalidField
from kvarn.tokenizer.fim import Infill, SourceFile
from kvarn.types import MAX_STOP_STRINGS, SamplingParams

MAX_FILES = 1024
# By our names, where llama-server has another one.
_PARAMS = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_window"}


class InfillFile(Body):
    """A file or a part of one that the model may look at."""

    INERT: ClassVar[frozenset[str]] = frozenset({"time"})
    text: str
    filename: str | None = Field(None, max_length=4096)


class InfillBody(Body):
    """Two texts, and what else is known of the project. What steers llama-server's own machinery has no effect."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"cache_prompt", "id_slot", "n_cache_reuse", "n_indent", "n_keep", "response_fields", "samplers"}
        | {"t_max_predict_ms", "t_max_prompt_ms", "timings_per_token"}
    )
    model: str | None = Field(None, description="An id of /v1/models; default: the first model")
    input_prefix: str = Field("", description="What stands before")
    input_suffix: str = Field("", description="What stands after")
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES)] | None = Field(
        None, description="Other files; of more than fits, the last ones are kept"
    )
    prompt: str | None = Field(None, description="Follows input_prefix")
    n_predict: int | None = Field(None, ge=-1, le=INT31, description="-1: until the end; 0: only read the prompt")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, le=INT31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=1, le=INT31)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description="-1: another one each time")
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None

    def infill(self) -> Infill:
        """The texts."""
        files = [SourceFile(file.text, file.filename or "tmp") for file in self.input_extra or ()]
        return Infill(self.input_prefix + (self.prompt or ""), self.input_suffix, files)

    def params(self) -> SamplingParams:
        """How the tokens are chosen, by our names."""
        own = {"model", "input_prefix", "input_suffix", "input_extra", "prompt", "n_predict", "stream"}
        given: dict[str, Any] = {
            _PARAMS.get(name, name): value for name, value in self.model_dump(exclude=own, exclude_none=True).items()
        }
        if self.seed == -1:
            del given["seed"]
        if self.n_predict is not None and self.n_predict >= 0:
            given |= {"max_tokens": max(1, self.n_predict), "prefill_only": self.n_predict == 0}
        try:
            return SamplingParams(**given)
        except InvalidParameter as error:
            raise InvalidField(str(error), error.field) from None


class InfillTimings(Answer):
    """How long it took, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class InfillAnswer(Answer):
    """The text between. In a stream, every event but the last has content and stop only."""

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
