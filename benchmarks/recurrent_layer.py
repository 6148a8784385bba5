"""How long layers with a state take: decoding far into a text, and prompts, beside attention of the same width.

    python -m benchmarks.recurrent_layer [--threads N] [--rounds N] [--cpu] [--write]

One layer of each kind with the shape of a Qwen3.5 of 0.8B parameters or, of state spaces, of a Mamba of the same width,
random Q8_0 weights, native backend. --cpu: processor time instead of the clock, for a machine that is shared; of one
thread, since idle threads of a pool spin. --write: the medians to benchmarks/results/recurrent-layers.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.results import write_result

from kvarn.backends.batch import Batch, KVLayout, StateSlots
from kvarn.backends.native.backend import NativeBackend
from kvarn.formats.quants import quantize
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.models.recurrent import kv_layers, state_layers
from kvarn.models.spec import Attention, Autoregressive, Block, FeedForward, InputEmbedding, ModelSpec, Norm
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, ShortConv
from kvarn.models.tensors.shapes import expected_tensors

WIDTH, VOCAB, CONTEXT = 1024, 256, 17_000
NORM = Norm("rms", 1e-6)
MIXERS = {
    "gated delta net": GatedDeltaNet(16, 16, 128, 128, 4, NORM),
    "Mamba-2": Mamba2(32, 64, 1, 128, 4, NORM),
    "Mamba": Mamba(2 * WIDTH, 16, WIDTH // 16, 4),
    "short convolution": ShortConv(WIDTH, 3),
    "attention": Attention(num_heads=8, num_kv_heads=2, head_dim=256, scale=0.0625, rope=None),
}
EMPTY = np.empty(0, np.int32)


class RandomWeights:
    """Every tensor of a spec, drawn anew when asked for."""

    path = "random"
    metadata: Mapping[str, Any] = {}

    def __init__(self, spec: ModelSpec) -> None:
        shapes = {name: tuple(length or 1 for length in shape) for name, shape in expected_tensors(spec).items()}
        self.tensors = {name: TensorInfo(name, _type_of(name, shape), shape) for name, shape in shapes.items()}

    def array(self, name: str) -> npt.NDArray[np.float32]:
        values = np.random.default_rng(len(name)).standard_normal(self.tensors[name].shape)
        return (-np.abs(values) if name.endswith("ssm_a") else 0.05 * values).astype(np.float32)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return quantize(self.array(name), self.tensors[name].type)

    def release_pages(self, names: Iterable[str]) -> None: ...

    def verify_unchanged(self) -> None: ...

    def close(self) -> None: ...


def _type_of(name: str, shape: tuple[int, ...]) -> TensorType:
    is_matrix = len(shape) == 2 and not any(part in name for part in ("conv1d", "conv.conv", "ssm_a"))
    return TensorType.Q8_0 if is_matrix else TensorType.F32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    threads = 1 if options.cpu else options.threads
    found: dict[str, dict[str, float]] = {}
    for name, mixer in MIXERS.items():
        block = Block(mixer, FeedForward(32, "silu"), NORM)
        spec = ModelSpec(
            "random", name, WIDTH, VOCAB, CONTEXT, InputEmbedding(), (block,), None, None, Autoregressive()
        )
        found[name] = times = measure(spec, threads, options.rounds, clock)
        ratio = times["decode at 16k"] / times["decode at 1k"]
        shown = ", ".join(f"{what} {1e6 * seconds:,.0f} us" for what, seconds in times.items())
        print(f"{name}: {shown}; 16k / 1k = {ratio:.2f}", flush=True)
    if options.write:
        command = "python -m benchmarks.recurrent_layer" + (" --cpu" if options.cpu else "")
        write_result("recurrent-layers", {"seconds": found, "rounds": options.rounds}, command=command)


def measure(spec: ModelSpec, threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Medians of interleaved rounds."""
    backend = NativeBackend(threads)
    backend.load(spec, RandomWeights(spec))
    layout = KVLayout(16, kv_layers(spec), "f16", state_layers(spec), num_states=2)
    backend.reserve_kv(layout, -(-CONTEXT // 16) * layout.block_bytes)
    cases = {
        "decode at 1k": batch_at(1000, 1),
        "decode at 16k": batch_at(16_000, 1),
        "512 rows of a prompt": batch_at(0, 512),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, batch in cases.items():
            started = clock()
            backend.forward(batch)
            times[name].append(clock() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def batch_at(start: int, count: int) -> Batch:
    """One sequence."""
    ids = np.full(count, 7, np.int32)
    positions = np.arange(start, start + count, dtype=np.int32)
    table = np.arange(-(-(start + count) // 16), dtype=np.int32)[None]
    states = StateSlots(np.array([0 if start else -1], np.int32), np.array([1], np.int32), EMPTY, EMPTY)
    row_starts, context = np.array([0, count], np.int32), np.array([start + count], np.int32)
    return Batch(ids, positions, row_starts, context, table, np.array([count - 1], np.int32), states=states)


if __name__ == "__main__":
    main()
