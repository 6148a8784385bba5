"""What one request's choices of tokens depend on, kept from step to step: pure bookkeeping, no logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.backends.batch import Float32, Int32, RowSampling
from kvarn.request import Request
from kvarn.types import SamplingParams

BANNED = -1e9  # bias of a token that must not be chosen; finite, so that no inf - inf can arise


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What None in SamplingParams stands for, where the model's authors recommend nothing else."""

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Choice:
    """Parameters with the model's recommendations filled in, biases, and tokens seen so far."""

    def __init__(self, request: Request, defaults: SamplingDefaults, eos_ids: tuple[int, ...]) -> None:
        params = request.params
        self._fixed = resolve(params, defaults) | {"seed": request.seed % 2**64}
        self._bias = _bias(dict(params.logit_bias))
        stops = (() if params.ignore_eos else eos_ids) + params.stop_token_ids
        self._bias_before_min = _bias(dict(params.logit_bias) | dict.fromkeys(stops, BANNED))
        self._seen = SeenTokens(request.prompt_ids) if _has_penalties(self._fixed) else None

    def row(self, request: Request) -> RowSampling:
        """Everything the choice of the next token depends on."""
        is_early = request.num_output < request.params.min_tokens
        bias_ids, bias_values = self._bias_before_min if is_early else self._bias
        fixed = self._fixed | {"position": len(request.token_ids), "bias_ids": bias_ids, "bias_values": bias_values}
        if self._seen is None:
            return RowSampling(**fixed)
        self._seen.update(request)
        return RowSampling(**fixed, seen_ids=self._seen.ids, seen_counts=self._seen.counts)


class SeenTokens:
    """Distinct tokens of prompt and answer, with how often the answer has each."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._num_read = len(prompt_ids)
        self._counts: dict[int, int] = dict.fromkeys(prompt_ids, 0)

    def update(self, request: Request) -> None:
        for token_id in request.token_ids[self._num_read :]:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._num_read = len(request.token_ids)

    @property
    def ids(self) -> Int32:
        return np.fromiter(self._counts.keys(), np.int32, len(self._counts))

    @property
    def counts(self) -> Int32:
        return np.fromiter(self._counts.values(), np.int32, len(self._counts))


def resolve(params: SamplingParams, defaults: SamplingDefaults) -> dict[str, Any]:
    """Fill in what the caller left open."""
    return {
        "temperature": _first(params.temperature, defaults.temperature),
        "top_k": _first(params.top_k, defaults.top_k),
        "top_p": _first(params.top_p, defaults.top_p),
        "min_p": _first(params.min_p, defaults.min_p),
        "typical_p": params.typical_p,
        "repetition_penalty": _first(params.repetition_penalty, defaults.repetition_penalty),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _has_penalties(fixed: dict[str, Any]) -> bool:
    return bool(fixed["repetition_penalty"] != 1.0 or fixed["presence_penalty"] or fixed["frequency_penalty"])


def _bias(bias: dict[int, float]) -> tuple[Int32, Float32]:
    ids = sorted(bias)
    return np.array(ids, np.int32), np.array([bias[i] for i in ids], np.float32)
