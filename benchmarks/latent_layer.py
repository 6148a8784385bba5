"""How long latent attention takes to decode far into a text, beside the same heads with keys and values of their own.

    python -m benchmarks.latent_layer [--threads N] [--rounds N] [--write]

One layer with the shape of DeepSeek-V2-Lite, random Q8_0 weights, native backend. Seconds of processor time, so that
what else runs on the machine matters less. --write: to benchmarks/results/latent-layer.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from tests.results import write_result

from benchmarks.recurrent_layer import NORM, RandomWeights, batch_at
from kvarn.backends.batch import BlockCopy, KVLayout
from kvarn.backends.native.backend import NativeBackend
from kvarn.models.recurrent import kv_layers, latent_layers
from kvarn.models.spec import (
    Attention,
    Autoregressive,
    Block,
    FeedForward,
    InputEmbedding,
    LatentAttention,
    ModelSpec,
    Rope,
)

WIDTH, VOCAB, CONTEXT = 2048, 256, 17_000
FILLED = 512  # tokens that are computed; the rest of the cache is copies of them
HEADS, RANK, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128
ANGLES = Rope("interleaved", tuple(float(f) for f in np.power(10000.0, -np.arange(0, ROPE, 2) / ROPE)))
MIXERS = {
    "latent": LatentAttention(HEADS, None, RANK, NOPE, ROPE, VALUE, 0.07, ANGLES, NORM),
    # Keys of 192 and values of 128 dimensions: together as much as 160 and 160.
    "expanded": Attention(HEADS, HEADS, (NOPE + ROPE + VALUE) // 2, 0.07, ANGLES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    backends = {name: make(name, options.threads) for name in MIXERS}
    cases = {f"decode at {n // 1000}k": batch_at(n, 1) for n in (1000, 4000, 16_000)}
    cases |= {f"512 rows of a prompt behind {n // 1000}k": batch_at(n, 512) for n in (0, 16_000)}
    found: dict[str, dict[str, float]] = {}
    for what, batch in cases.items():
        times: dict[str, list[float]] = {name: [] for name in MIXERS}
        for _ in range(options.rounds):
            for name, backend in backends.items():
                started = time.process_time()
                backend.forward(batch)
                times[name].append(time.process_time() - started)
        found[what] = {name: statistics.median(taken) for name, taken in times.items()}
        shown = ", ".join(f"{name} {1e6 * seconds:,.0f} us" for name, seconds in found[what].items())
        print(f"{what}: {shown}; latent / expanded = {found[what]['latent'] / found[what]['expanded']:.2f}", flush=True)
    if options.write:
        figures = {"seconds": found, "rounds": options.rounds}
        write_result("latent-layer", figures, command="python -m benchmarks.latent_layer")
    print(json.dumps(found))


def make(name: str, threads: int) -> NativeBackend:
    """A model of one layer, with its cache."""
    block = Block(MIXERS[name], FeedForward(32, "silu"), NORM)
    spec = ModelSpec("random", name, WIDTH, VOCAB, CONTEXT, InputEmbedding(), (block,), None, None, Autoregressive())
    backend = NativeBackend(threads)
    backend.load(spec, RandomWeights(spec))
    layout = KVLayout(16, kv_layers(spec), "f16", latent=latent_layers(spec))
    print(f"{name}: {layout.token_bytes:,} bytes of cache per token", flush=True)
    num_blocks = backend.reserve_kv(layout, -(-CONTEXT // 16) * layout.block_bytes)
    backend.forward(batch_at(0, FILLED))  # pages that nobody has written would all be the same one
    filled = FILLED // 16
    backend.copy_blocks([BlockCopy(block % filled, block, 16) for block in range(filled, num_blocks)])
    return backend


if __name__ == "__main__":
    main()
