"""Models of one process share its threads: loading one leaves the steps of the others their turns."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from tests.running import batch_of, layout_of
from tests.tiny_models import tiny_model

ROWS, COLUMNS = 65_536, 1024  # of 256 MiB, 64 turns


def test_steps_are_computed_while_a_large_matrix_is_packed(tmp_path: Path) -> None:
    description = describe(open_weights(tiny_model("llama", tmp_path)))
    running = NativeBackend(2)
    running.load(description.spec, description.weights)
    layout = layout_of(description.spec, "f16")
    running.reserve_kv(layout, 4 * layout.block_bytes)
    batch = batch_of([([5, 6, 7], 0)], np.arange(4, dtype=np.int32)[None])
    durations, is_loaded = [0.0], threading.Event()

    def step() -> None:
        while not is_loaded.is_set():
            started = time.perf_counter()
            running.forward(batch)
            durations.append(time.perf_counter() - started)

    raw = np.zeros(ROWS * COLUMNS * 4, np.uint8)
    model = _native.Model(description.spec, _native.ThreadTeam(2), "")
    model.reserve_weights(_native.packed_bytes(TensorType.F32.id, 1, ROWS, COLUMNS))
    thread = threading.Thread(target=step)
    thread.start()
    started = time.perf_counter()
    model.add_matrices("large", TensorType.F32.id, 1, ROWS, COLUMNS, raw)
    loading_s = time.perf_counter() - started
    is_loaded.set()
    thread.join()
    assert max(durations) < loading_s / 2, "a step waited for the whole matrix"
