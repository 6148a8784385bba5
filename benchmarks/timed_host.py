"""The process of an engine whose backend only takes time: benchmarks.http_streams starts it as the server's engine."""

from __future__ import annotations

import os

from benchmarks.http_streams import use_timed_backend
from kvarn.engine.process import host

if __name__ == "__main__":
    use_timed_backend(float(os.environ["KVARN_BENCH_STEP_MS"]))
    host.main()
