"""llama.cpp's HTTP server of the xllamacpp wheel as a process: prints its version and its address, then serves.

python -m benchmarks.engines.xllama_server MODEL THREADS SLOTS CONTEXT
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import xllamacpp

from benchmarks.engines.xllama import server_params, version


def main() -> None:
    model, (threads, slots, context) = Path(sys.argv[1]), map(int, sys.argv[2:])
    params = server_params(model, threads, slots, context)
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.use_jinja = True  # as its own command line has it; without, it takes no tools
    server = xllamacpp.Server(params)
    print(version())
    print(f"serving on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
