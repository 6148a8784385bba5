"""Sampling rows for the positions of a diffusion canvas: parameters, biases and random keys of each position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvarn.backends.batch import RowSampling
from kvarn.decoding.sampling_state import SamplingDefaults, biased_row, resolve
from kvarn.request import Request
from kvarn.sampling.sampler import BANNED


class PositionSampling:
    """One request's parameters, biases and random keys. The mask token, if there is one, is banned."""

    def __init__(
        self,
        request: Request,
        defaults: SamplingDefaults,
        *,
        eos_ids: tuple[int, ...],
        mask_id: int | None = None,
        cfg_scale: float = 0.0,
    ) -> None:
        params = request.params
        static = resolve(params, defaults) | {"repetition_penalty": 1.0, "cfg_scale": cfg_scale}
        static |= {"seed": request.seed % 2**64, "choice": request.choice}
        bias = dict(params.logit_bias) | ({} if mask_id is None else {mask_id: BANNED})
        stop_ids = (() if params.ignore_eos else eos_ids) + params.stop_token_ids
        self._row = biased_row(static, bias)
        self._row_below_min_tokens = biased_row(static, bias | dict.fromkeys(stop_ids, BANNED))
        self._min_end = request.num_prompt + params.min_tokens

    def rows(self, positions: Iterable[int], step: int, **changes: Any) -> Iterator[RowSampling]:
        """step: of the block, so that every denoising step draws anew. changes: other fields, of all rows."""
        for position in positions:
            row = self._row_below_min_tokens if position < self._min_end else self._row
            yield row.at(position, draw=step, **changes)
