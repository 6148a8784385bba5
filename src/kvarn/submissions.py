"""What callers pass becomes submissions for the engine: prompts encoded, parameters checked, constraints compiled.

Knows the model's words and bounds; never sees the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.adapters.pool import AdapterPool, LoraChoice
from kvarn.checks import check_parameter
from kvarn.citations.types import Grounded
from kvarn.diffusion import DiffusionParams
from kvarn.engine.admission import Admission
from kvarn.engine.submission import Submission
from kvarn.errors import InvalidParameter, PromptTooLong, UnsupportedModel
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.spec import Encoder, MaskedDiffusion, ModelSpec
from kvarn.prompts import (
    LoraOfEach,
    ParamsOfEach,
    Prompt,
    TokenIds,
    is_messages,
    loras_of_each,
    params_of_each,
    require_params,
    whole_numbers,
    with_constraint,
)
from kvarn.structured.compiler import ConstraintCompiler
from kvarn.tokenizer.fim import Infill, fim_prompt, require_fim
from kvarn.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.fill.layout import CanvasLayout
    from kvarn.fill.template import Parts
    from kvarn.tokenizer.tokenizer import Tokenizer

MAX_PREDICTION = 1 << 18  # characters of a prediction that are read
MAX_CHARACTERS_PER_TOKEN = 16  # of them, of as many tokens as the answer may have
ReadMiddle = Callable[[Completion], Completion]  # the middle, of what the engine answers
INFILL_ROOM = 512  # tokens left for a middle without max_tokens where other files would fill the context


class Submissions:
    """Makes the submissions of one model. Encodes text, so event loops call it in another thread."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, adapters: AdapterPool) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self.adapters = adapters
        self.constraints = ConstraintCompiler(tokenizer, spec.vocab_size)

    def of_prompt(
        self,
        prompt: Prompt | Sequence[Message] | object,
        params: SamplingParams | None,
        tools: Sequence[Any] | None = None,
        *,
        tenant: str = "",
        lora: LoraChoice = None,
    ) -> Submission:
        """Take a text, token ids or messages. lora: the adapter to answer with."""
        if is_messages(prompt):
            return self.of_chat(prompt, params, tools, tenant=tenant, lora=lora)
        return self.of_ids(encoded(self._tokenizer, prompt), params, tenant, lora=lora)

    def of_prompts(
        self, prompts: Sequence[Any], params: ParamsOfEach, lora: LoraOfEach
    ) -> list[Callable[[], Submission]]:
        """What makes the submission of each prompt; params and lora: for all of them, or one for each."""
        each = zip(prompts, params_of_each(params, len(prompts)), loras_of_each(lora, len(prompts)), strict=True)
        return [partial(self.of_prompt, one, chosen, lora=adapter) for one, chosen, adapter in each]

    def of_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Sequence[Any] | None,
        *,
        tenant: str = "",
        lora: LoraChoice = None,
    ) -> Submission:
        """Take a conversation, written with the model's chat template."""
        self.require_generator("chat")
        require_params(params)
        ids = self._tokenizer.encode_chat(messages, tools=tools)
        return self.of_ids(ids, params, tenant, starts_text=True, lora=lora)

    def of_grounded(
        self,
        grounded: Grounded,
        params: SamplingParams | None,
        tools: Sequence[Any] | None,
        *,
        lora: LoraChoice = None,
    ) -> Submission:
        """Take a conversation with its sources, and the form that retrieval gives to the answer."""
        require_params(params)
        if tools is None or (isinstance(tools, list | tuple) and not tools):
            params = with_constraint(params or SamplingParams(), grounded, self._spec)
        return self.of_chat(grounded.messages, params, tools, lora=lora)

    def of_infill(
        self,
        infill: Infill,
        params: SamplingParams | None,
        context: int,
        *,
        tenant: str = "",
        lora: LoraChoice = None,
    ) -> Submission:
        """Take two texts, for the model to write what fits between them; it stops where its middle ends."""
        self.require_generator("fill in the middle")
        if isinstance(self._spec.generation, UniformDiffusion):
            raise UnsupportedModel(
                f"{self._spec.name!r} denoises what comes behind a text and cannot fill a middle; use another model"
            )
        if isinstance(self._spec.generation, MaskedDiffusion):
            raise UnsupportedModel(
                f"{self._spec.name!r} is a diffusion model and fills in on a canvas; use suffix of /v1/completions, "
                "LLM.infill, or a template with kvarn fill"
            )
        require_params(params)
        check_parameter.instance("prefix", infill.prefix, str, "a string")
        check_parameter.instance("suffix", infill.suffix, str, "a string")
        params = params or SamplingParams()
        answer = min(INFILL_ROOM if params.max_tokens is None else params.max_tokens, context // 2)
        ids = fim_prompt(self._tokenizer, infill, context - answer, is_truncated=params.truncate == "left")
        return self.of_ids(ids, with_fim_stops(self._tokenizer, params).replace(truncate=None), tenant, lora=lora)

    def of_middle(
        self,
        infill: Infill,
        params: SamplingParams | None,
        context: int,
        *,
        prompt_ids: TokenIds | None = None,
        lora: LoraChoice = None,
    ) -> tuple[Submission, ReadMiddle]:
        """The same for every kind of model, and how its answer is read. prompt_ids: instead of the prefix."""
        if not isinstance(self._spec.generation, MaskedDiffusion):
            return self.of_infill(infill, params, context, lora=lora), lambda completion: completion
        from kvarn.fill.middle import MiddleReader, middle_parts

        check_parameter.instance("prefix", infill.prefix, str, "a string")
        check_parameter.instance("suffix", infill.suffix, str, "a string")
        require_params(params)
        params = params or SamplingParams()
        after_space = prompt_ids is None and infill.prefix.endswith(" ")  # which belongs to the first word after it
        prefix = infill.prefix.removesuffix(" ")
        ids = prompt_ids if prompt_ids is not None else self._tokenizer.encode(prefix) if prefix else []
        parts = middle_parts(infill.suffix, params.max_tokens)
        try:
            submission, layout = self.of_fill(ids, parts, params.replace(max_tokens=None), context, lora=lora)
        except InvalidParameter as error:
            if error.field != "template":
                raise
            raise InvalidParameter(
                f"prefix, middle and suffix take more than the context of {context:,} tokens; shorten them, or lower "
                "max_tokens",
                field="suffix",
            ) from None
        return submission, MiddleReader(self._tokenizer, layout, after_space, infill.suffix.startswith(" "))

    def of_fill(
        self,
        ids: TokenIds,
        parts: Parts,
        params: SamplingParams | None,
        context: int,
        *,
        tenant: str = "",
        lora: LoraChoice = None,
    ) -> tuple[Submission, CanvasLayout]:
        """Take a template, which is the whole answer: its literals pinned, its slots under their constraints."""
        if not isinstance(self._spec.generation, MaskedDiffusion):
            raise UnsupportedModel(
                f"{self._spec.name!r} has no mask token and cannot fill a template; use a masked diffusion model such "
                "as tiny-diffusion, or a constraint"
            )
        require_params(params)
        params = params or SamplingParams()
        for name in ("max_tokens", "stop", "constraint", "logprobs"):
            if getattr(params, name) not in (None, ()):
                raise InvalidParameter(f"{name} has no meaning for a template; leave it out", field=name)
        if params.diffusion is not None and params.diffusion.pinned:
            raise InvalidParameter("pinned has no meaning for a template; leave it out", field="diffusion")
        ids = ids or self._tokenizer.eos_ids[:1]  # where nothing stands before a text, the end of another does
        if len(ids) >= context:
            raise PromptTooLong(len(ids), context - 1)
        from kvarn.fill.layout import lay_out

        layout = lay_out(self._tokenizer, parts, self.constraints.compile, context - len(ids))
        diffusion = replace(params.diffusion or DiffusionParams(), pinned=layout.pinned)
        params = params.replace(max_tokens=layout.num_tokens, ignore_eos=True, diffusion=diffusion)
        return replace(self.of_ids(ids, params, tenant, lora=lora), slots=layout.slots), layout

    def of_ids(
        self,
        ids: TokenIds,
        params: SamplingParams | None,
        tenant: str = "",
        *,
        starts_text: bool = False,
        lora: LoraChoice = None,
    ) -> Submission:
        """Take token ids. starts_text: the answer is the start of a text, as after a chat template."""
        self.require_generator("generate")
        require_params(params)
        check_parameter.instance("tenant", tenant, str, "a string")
        if "\0" in tenant:
            raise InvalidParameter("the tenant's name has a NUL, which no name may have", field="tenant")
        params = params or SamplingParams()
        if params.diffusion is not None and isinstance(self._spec.generation, MaskedDiffusion):
            from kvarn.fill.pins import with_pinned_ids

            pinned = with_pinned_ids(params.diffusion, self._tokenizer, self._spec.context_length)
            params = params.replace(diffusion=pinned)
        constraint = None if params.constraint is None else self.constraints.compile(params.constraint)
        predicted = self.prediction(params)
        uses = self.adapters.uses(lora)  # last: what is refused before holds no adapter
        return Submission(
            ids, params, starts_text, tenant, constraint=constraint, prediction_ids=predicted, adapters=uses
        )

    def ids_to_score(self, token_ids: TokenIds, admission: Admission) -> list[int]:
        """Token ids that the model can score from left to right."""
        self.require_generator("score")
        if self._spec.is_diffusion:
            raise UnsupportedModel(f"{self._spec.name!r} is a diffusion model and cannot score text from left to right")
        ids = whole_numbers(token_ids)
        admission.check_tokens("token_ids", ids)
        admission.check_length(len(ids), admission.context)
        return ids

    def prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens of the answer that the caller expects, no more than a model could say."""
        if not (params.prediction and params.speculate):
            return ()
        limit = params.max_tokens or self._spec.context_length
        text = params.prediction[: min(MAX_CHARACTERS_PER_TOKEN * limit, MAX_PREDICTION)]
        return tuple(self._tokenizer.encode(text, add_special=False)[: 2 * limit])

    def require_generator(self, what: str) -> None:
        """Refuse what an encoder cannot do; what: the verb, such as chat."""
        if isinstance(self._spec.generation, Encoder):
            raise UnsupportedModel(f"{self._spec.name!r} is an encoder and cannot {what}; use embed, or another model")


def with_fim_stops(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Parameters of an answer that ends with the model's middle, too."""
    stop_ids = require_fim(tokenizer).stop_ids
    return params.replace(stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stop_ids))))


def encoded(tokenizer: Tokenizer, prompt: object) -> list[int]:
    """Token ids of a text, or the token ids that were given, checked to be whole numbers."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else whole_numbers(prompt)
