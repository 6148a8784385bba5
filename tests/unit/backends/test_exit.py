"""A process that ends while a thread of its computes natively."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading, time
from kvarn.backends.native import _native

threading.Thread(target=_native.kernels.dot_rate, args=("scalar", 0.4), daemon=True).start()
time.sleep(0.1)  # until it computes

class Late:
    sleep, write = staticmethod(time.sleep), staticmethod(os.write)

    def __del__(self):
        self.sleep(0.7)  # until it has computed
        self.write(1, b"ended")

late = Late()
"""


@pytest.mark.timeout(60)
def test_a_thread_that_computes_past_the_end_aborts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended", "")
