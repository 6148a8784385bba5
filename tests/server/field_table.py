"""Every field of a request: what it accepts, and the values it is tried with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.server.asking import CHAT, TEXT

INT31 = 2**31 - 1
CONTEXT, PROMPT = 2048, 34  # tokens: of the shared server, and of the shortest chat


@dataclass(frozen=True, slots=True)
class Field:
    """What a field accepts: numbers between low and high; None always means leaving it out."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    path: str = CHAT
    needs: tuple[tuple[str, Any], ...] = ()  # fields without which it means nothing
    accepted: tuple[Any, ...] = ()  # beside numbers

    def accepts(self, value: Any) -> bool:
        if value is None or any(value == one and type(value) is type(one) for one in self.accepted):
            return True
        if self.kind is str:
            return False
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if isinstance(value, float) and self.kind is int:
            return False
        return isinstance(value, int | float) and math.isfinite(value) and self.low <= value <= self.high


FIELDS = {
    "n": Field(int, 1, 16),
    "max_tokens": Field(int, 1, CONTEXT - PROMPT, needs=(("stop", ["a", "e"]),)),
    "max_completion_tokens": Field(int, 1, CONTEXT - PROMPT, needs=(("max_tokens", None), ("stop", ["a", "e"]))),
    "temperature": Field(float, 0, 100),
    "top_p": Field(float, 0, 1),
    "min_p": Field(float, 0, 1),
    "typical_p": Field(float, 0, 1),
    "top_k": Field(int, 0, INT31),
    "presence_penalty": Field(float, -2, 2),
    "frequency_penalty": Field(float, -2, 2),
    "repetition_penalty": Field(float, 0.01, 100),
    "repeat_penalty": Field(float, 0.01, 100, needs=(("repetition_penalty", None),)),
    "penalty_window": Field(int, 1, INT31),
    "dry_multiplier": Field(float, 0, 100),
    "dry_base": Field(float, 1, 100),
    "dry_allowed_length": Field(int, 1, 1000),
    "dry_sequence_breakers": Field(str, accepted=([],)),
    "xtc_probability": Field(float, 0, 1),
    "xtc_threshold": Field(float, 0, 1),
    "min_tokens": Field(int, 0, 2),
    "seed": Field(int, -(2**63), 2**63 - 1),
    "top_logprobs": Field(int, 0, 20, needs=(("logprobs", True),)),
    "prompt_logprobs": Field(int, 0, 20),
    "priority": Field(int, -100, 100),
    "logprobs": Field(bool),
    "stream": Field(bool),
    "ignore_eos": Field(bool),
    "speculate": Field(bool),
    "prediction": Field(str),
    "parallel_tool_calls": Field(bool),
    "stop": Field(str, accepted=("5", [])),
    "stop_token_ids": Field(str, accepted=([],)),
    "logit_bias": Field(str, accepted=({},)),
    "stream_options": Field(str, needs=(("stream", True),), accepted=({},)),
    "tools": Field(str, accepted=([],)),
    "tool_choice": Field(str),
    "response_format": Field(str),
    "guided_json": Field(str, needs=(("max_tokens", 3),), accepted=({},)),
    "guided_regex": Field(str, accepted=("5",)),
    "guided_grammar": Field(str),
    "truncate": Field(str),
    "cache_salt": Field(str, accepted=("5",)),
    "chat_template_kwargs": Field(str, accepted=({},)),
    "reasoning_effort": Field(str),
    "modalities": Field(str, accepted=([],)),
    "store": Field(str, accepted=(False,)),
    "user": Field(str, accepted=(-1, 0, 2**31, 2**63, 2**64, "5", True, [], {}, 1.5, 10**30)),
    "echo": Field(bool, path=TEXT),
    "best_of": Field(int, 1, 1, path=TEXT),
    "suffix": Field(str, path=TEXT),
}
VALUES: tuple[Any, ...] = (
    *(-1, 0, 2**31, 2**63, 2**64, math.nan, math.inf, -math.inf, "5", True, None, [], {}, 1.5, 10**30),
)
