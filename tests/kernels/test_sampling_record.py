"""The numbers of a RowSampling on their way into the core: by name, each in its place."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from kvarn.backends.batch import RowSampling
from kvarn.backends.native import _native

RECORD: np.dtype[np.void] = np.dtype(_native.sampling_record)


def test_the_record_has_every_number_of_a_row_and_nothing_else() -> None:
    assert set(RECORD.names or ()) == {field.name for field in fields(RowSampling) if field.type in {"int", "float"}}


def test_whole_numbers_of_a_row_keep_all_bits() -> None:
    whole = {field.name for field in fields(RowSampling) if field.type == "int"}
    assert {name for name in RECORD.names or () if RECORD[name] == np.uint64} == whole


def test_the_fields_of_the_record_fill_it_without_a_gap() -> None:
    assert sum(RECORD[name].itemsize for name in RECORD.names or ()) == RECORD.itemsize
