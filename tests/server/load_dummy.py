"""`python -m tests.server.load_dummy SHARE`: takes its share of one core, as a client would, until it is killed."""

from __future__ import annotations

import sys
import time

PERIOD_S = 0.02  # about as often as a busy server has something for its clients


def burn(share: float) -> None:
    """Use share seconds of CPU in every second; what was missed because others ran is made up for."""
    started, cpu_s = time.perf_counter(), time.process_time()
    while True:
        owed_s = share * (time.perf_counter() - started) - (time.process_time() - cpu_s)
        end_s = time.process_time() + owed_s
        while time.process_time() < end_s:
            pass
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    burn(float(sys.argv[1]))
