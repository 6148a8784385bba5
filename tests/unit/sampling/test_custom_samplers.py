"""The registry of users' samplers and what a sampler is handed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn.backends.batch import RowSampling
from kvarn.errors import ConfigError, InvalidParameter
from kvarn.sampling.custom_samplers import Draw, Float32, find_sampler, run_sampler
from kvarn.sampling.philox import USER_SAMPLER, uniform

LOGITS = np.array([0.0, 3.0, 1.0], np.float32)


def second_best(logits: Float32, token_ids: Sequence[int], draw: Draw) -> int:
    return int(np.argsort(-logits)[1])


def test_a_registered_sampler_is_found_and_replaced_by_a_later_one() -> None:
    kvarn.register_sampler("test-found", lambda logits, token_ids, draw: 0)
    kvarn.register_sampler("test-found", second_best)
    assert find_sampler("test-found") is second_best


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    kvarn.register_sampler("test-known", second_best)
    with pytest.raises(InvalidParameter, match=r"'nobody'.*test-known"):
        find_sampler("nobody")


@pytest.mark.parametrize(("name", "function"), [("", second_best), ("x" * 65, second_best), (5, second_best), ("a", 5)])
def test_names_and_functions_of_the_wrong_kind_are_refused(name: Any, function: Any) -> None:
    with pytest.raises(ConfigError):
        kvarn.register_sampler(name, function)


def test_a_sampler_sees_biased_logits_the_text_and_its_own_draws() -> None:
    seen: dict[str, Any] = {}

    def sampler(logits: Float32, token_ids: Sequence[int], draw: Draw) -> int:
        seen.update(logits=logits.tolist(), token_ids=token_ids, draws=[draw(), draw()])
        logits[:] = 0  # its own copy
        return 2

    bias = {"bias_ids": np.array([0], np.int32), "bias_values": np.array([5], np.float32)}
    row = RowSampling(seed=4, position=7, choice=1, **bias)  # type: ignore[arg-type]
    logits = LOGITS.copy()
    assert run_sampler(sampler, logits, row, [8, 9]) == 2
    assert seen["logits"] == [5.0, 3.0, 1.0]
    assert seen["token_ids"] == (8, 9)
    assert seen["draws"] == [uniform(4, 7, 1, USER_SAMPLER), uniform(4, 7, 1, USER_SAMPLER + 1)]
    np.testing.assert_array_equal(logits, LOGITS)


@pytest.mark.parametrize("returned", [-1, 3, 1.0, None, "a"])
def test_what_is_no_token_id_is_an_error(returned: Any) -> None:
    with pytest.raises(ValueError, match="not a token id"):
        run_sampler(lambda logits, token_ids, draw: returned, LOGITS, RowSampling(), [])


def test_a_numpy_integer_is_a_token_id() -> None:
    assert run_sampler(lambda logits, token_ids, draw: np.argmax(logits), LOGITS, RowSampling(), []) == 1
