"""The fields around every OpenAI answer: id, time, model, fingerprint, usage, finish reason."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarn import __version__
from kvarn.types import FinishReason, Usage

if TYPE_CHECKING:
    from kvarn.server.chat.generation import Generation
    from kvarn.server.models.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Envelope:
    """The same for all chunks of one answer."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @staticmethod
    def of(generation: Generation, prefix: str, kind: str) -> Envelope:
        """prefix: of the id; kind: of object."""
        model = generation.model
        return Envelope(f"{prefix}{generation.request.id}", kind, int(time.time()), model.id, fingerprint(model))

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def fingerprint(model: ServedModel) -> str:
    """Build, weights and kernels: with the same three, the same request gives the same bytes."""
    return f"kvarn-{__version__}-{(model.entry.digest or 'local')[:12]}-{model.llm.llm.isa}"


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def finish_word(reason: FinishReason, *, has_whole_calls: bool = False) -> str:
    """OpenAI's word for the end of an answer; `cancelled`, which it does not have, is ours."""
    return "tool_calls" if has_whole_calls and reason is FinishReason.STOP else str(reason)
