"""llama.cpp's HTTP server of the xllamacpp wheel as a process: prints its version and its address, then serves.

python -m benchmarks.engines.xllama_server MODEL THREADS SLOTS CONTEXT [--speculate ngram_mod] [--lora ADAPTER.gguf ...]
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.engines.xllama import server_params, version


def main() -> None:
    options = _options()
    params = server_params(options.model, options.threads, options.slots, options.context)
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.use_jinja = True  # as its own command line has it; without, it takes no tools
    if options.speculate is not None:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{options.speculate.upper()}")]
    if options.lora:
        params.lora_adapters = [_adapter(path) for path in options.lora]
        params.lora_init_without_apply = True  # each request names its own
    server = xllamacpp.Server(params)
    print(version())
    print(f"serving on {server.listening_address}", flush=True)
    signal.pause()


def _adapter(path: Path) -> Any:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = str(path), 1.0
    return adapter


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("slots", type=int)
    parser.add_argument("context", type=int)
    parser.add_argument("--speculate", metavar="KIND", help="ngram_mod, ngram_simple, ...: its defaults")
    parser.add_argument("--lora", type=Path, nargs="*", default=())
    return parser.parse_args()


if __name__ == "__main__":
    main()
