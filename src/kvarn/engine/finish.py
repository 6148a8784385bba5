"""When an answer is over, as far as token ids can tell: a pure rule."""

from __future__ import annotations

from kvarn.request import Finish, Request
from kvarn.types import FinishReason


def finish_after(request: Request, token_id: int, num_output: int, eos_ids: tuple[int, ...]) -> Finish | None:
    """The end that token_id, the num_output-th token of the answer, brings; None: go on."""
    params = request.params
    if num_output > params.min_tokens:
        if token_id in params.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        if token_id in eos_ids and not params.ignore_eos:
            return Finish(FinishReason.STOP, token_id)
    if len(request.prompt_ids) + num_output >= request.max_total_tokens:
        return Finish(FinishReason.LENGTH)
    return None
