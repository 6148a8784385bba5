"""What callers pass becomes submissions for the engine: prompts encoded, parameters checked, constraints compiled.

Knows the model's words and bounds; never sees the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarn.engine.submission import Submission
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.models.spec import Encoder, ModelSpec
from kvarn.prompts import Prompt, TokenIds, is_messages, whole_numbers
from kvarn.structured.compiler import ConstraintCompiler
from kvarn.types import Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer


class Submissions:
    """Makes the submissions of one model. Encodes text, so event loops call it in another thread."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self.constraints = ConstraintCompiler(tokenizer, spec.vocab_size)

    def of_prompt(
        self,
        prompt: Prompt | Sequence[Message] | object,
        params: SamplingParams | None,
        tools: Sequence[Any] | None = None,
        *,
        tenant: str = "",
    ) -> Submission:
        """Take a text, token ids or messages."""
        if is_messages(prompt):
            return self.of_chat(prompt, params, tools, tenant=tenant)
        return self.of_ids(encoded(self._tokenizer, prompt), params, tenant)

    def of_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Sequence[Any] | None,
        *,
        tenant: str = "",
    ) -> Submission:
        """Take a conversation, written with the model's chat template."""
        self.require_generator("chat")
        ids = self._tokenizer.encode_chat(messages, tools=tools)
        return self.of_ids(ids, params, tenant, starts_text=True)

    def of_ids(
        self, ids: TokenIds, params: SamplingParams | None, tenant: str = "", *, starts_text: bool = False
    ) -> Submission:
        """Take token ids. starts_text: the answer is the start of a text, as after a chat template."""
        self.require_generator("generate")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidParameter(f"params is {params!r:.60}; give a SamplingParams")
        if not isinstance(tenant, str):
            raise InvalidParameter(f"tenant is {tenant!r:.60}; give a string")
        if params is None or params.constraint is None:
            return Submission(ids, params or SamplingParams(), starts_text, tenant)
        return Submission(ids, params, starts_text, tenant, constraint=self.constraints.compile(params.constraint))

    def require_generator(self, what: str) -> None:
        """Refuse what an encoder cannot do; what: the verb, such as chat."""
        if isinstance(self._spec.generation, Encoder):
            raise UnsupportedModel(f"{self._spec.name!r} is an encoder and cannot {what}; use embed, or another model")


def encoded(tokenizer: Tokenizer, prompt: object) -> list[int]:
    """Token ids of a text, or the token ids that were given, checked to be whole numbers."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else whole_numbers(prompt)
