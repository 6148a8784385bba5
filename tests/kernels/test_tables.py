"""The tables this CPU can run."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.backends.native._native import kernels


def test_the_scalar_table_is_always_there_and_last() -> None:
    assert kernels.tables()[-1] == "scalar"


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'sse9'.*scalar"):
        kernels.argmax("sse9", np.zeros(1, np.float32))
