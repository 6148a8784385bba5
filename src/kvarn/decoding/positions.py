"""What the choice of a token at each position of a canvas depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvarn.backends.batch import RowSampling
from kvarn.decoding.sampling_state import BANNED, SamplingDefaults, biased_row, resolve
from kvarn.request import Request


class PositionChoices:
    """One request's parameters, biases and random keys. The mask token is never an answer."""

    def __init__(
        self, request: Request, defaults: SamplingDefaults, *, eos_ids: tuple[int, ...], mask_id: int, cfg_scale: float
    ) -> None:
        params = request.params
        fixed = resolve(params, defaults) | {"repetition_penalty": 1.0, "cfg_scale": cfg_scale}
        fixed |= {"seed": request.seed % 2**64, "choice": request.choice}
        bias = dict(params.logit_bias) | {mask_id: BANNED}
        stops = (() if params.ignore_eos else eos_ids) + params.stop_token_ids
        self._row = biased_row(fixed, bias)
        self._row_before_min = biased_row(fixed, bias | dict.fromkeys(stops, BANNED))
        self._min_end = request.num_prompt + params.min_tokens

    def rows(self, positions: Iterable[int], step: int) -> Iterator[RowSampling]:
        """step: of the block, so that every denoising step draws anew."""
        for position in positions:
            yield (self._row_before_min if position < self._min_end else self._row).at(position, draw=step)
