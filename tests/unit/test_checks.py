"""Refusals of single values: one form of message for every class of error, and the name of the value as a field."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest

from kvarn import DiffusionParams, SamplingParams
from kvarn.checks import check_parameter, check_setting
from kvarn.errors import ConfigError, InvalidParameter


@pytest.mark.parametrize("value", [-1, 11, 2.0, True, None, "3", math.nan])
def test_a_whole_number_out_of_range_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidParameter, match=r"^top_k is .*; give a whole number from 0 to 10$") as refused:
        check_parameter.integer("top_k", value, 0, 10)
    assert refused.value.field == "top_k"


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, 10**400, True, None, "3"])
def test_a_number_out_of_range_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^share is .*; give a number from 0 to 1$"):
        check_setting.number("share", value, 0.0, 1.0)


def test_limits_are_written_in_the_form_of_the_checker() -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 4,096$"):
        check_setting.integer("block_size", 0, 1, 4096)
    with pytest.raises(ConfigError, match=r"from 1 to 4096, or leave it out$"):
        replace(check_setting, integer_format="", hint=", or leave it out").integer("block_size", 0, 1, 4096)


def test_none_passes_only_where_it_is_optional() -> None:
    checks = [
        partial(check_parameter.integer, "steps", None, 1, 2),
        partial(check_parameter.number, "top_p", None, 0.0, 1.0),
        partial(check_parameter.one_of, "cache", None, ("dual",)),
    ]
    for check in checks:
        check(optional=True)
        with pytest.raises(InvalidParameter, match="is None"):
            check()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(top_p=2.0), "top_p"),
        (lambda: SamplingParams(stop=("",)), "stop"),
        (lambda: SamplingParams(stop=("a\ud800",)), "stop"),
        (lambda: SamplingParams(dry_sequence_breakers=("\n", "\ud800")), "dry_sequence_breakers"),
        (lambda: SamplingParams(min_tokens=5, max_tokens=4), "min_tokens"),
        (lambda: DiffusionParams(policy="best"), "policy"),  # type: ignore[arg-type]
    ],
)
def test_a_refused_parameter_is_named_in_a_field(make: object, field: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        make()  # type: ignore[operator]
    assert refused.value.field == field


def test_an_invalid_parameter_survives_pickling_and_copying() -> None:
    error = InvalidParameter("n is 0", field="n")
    assert type(error)(*error.args).args == error.args
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(other), other.field) == ("n is 0", "n")
