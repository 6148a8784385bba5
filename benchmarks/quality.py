"""How far the native backend deviates from exact arithmetic on real text, beside llama.cpp on the same file and tokens.

Teacher-forced in windows of running text: KL(reference || backend) and top-1 agreement, where the reference is the
NumPy backend with all weights dequantised to float32. The peer is used when `llama_cpp` is installed.

    python benchmarks/quality.py MODEL.gguf [--tokens 4096] [--window 1024] [--isa avx2,avx512_vnni] [--no-peer]

Prints a table for people and one JSON line, last, for machines.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, KVLayout
from kvarn.backends.protocol import Backend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec
from kvarn.tokenizer import load_tokenizer

CHUNK = 128  # rows of logits alive at once
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over all scored tokens."""

    kl: float
    top1: float
    num_tokens: int


def running_text() -> str:
    """English prose that every Python installation carries: the language reference behind help()."""
    from pydoc_data.topics import topics

    return "\n\n".join(textwrap.dedent(topics[name]) for name in sorted(topics))


def measure(
    path: Path, num_tokens: int, window: int, with_peer: bool, tables: Sequence[str] = ()
) -> dict[str, Divergence]:
    """Compare native (and llama.cpp, if wanted and installed) with the reference over num_tokens of text.

    Native is this machine's best kernel table or, by their names, each of those given.
    """
    from kvarn.backends.native.backend import NativeBackend
    from kvarn.backends.reference.backend import ReferenceBackend

    source = open_weights(path)
    description = describe(source)
    ids = load_tokenizer(source).encode(running_text(), add_special=False)[:num_tokens]
    runners: dict[str, Callable[[list[int]], Iterator[Logits]]] = {}
    natives = {table: NativeBackend(2, table) for table in tables} or {"native": NativeBackend(2, None)}
    for name, backend in {"reference": ReferenceBackend(), **natives}.items():
        backend.load(description.spec, description.weights)
        runners[name] = _runner(backend, description.spec, window)
    if with_peer:
        runners["llama.cpp"] = _llama_cpp(path, window)
    sums = {name: np.zeros(2) for name in runners if name != "reference"}
    for begin in range(0, len(ids), window):
        _accumulate(sums, {name: run(ids[begin : begin + window]) for name, run in runners.items()})
    return {name: Divergence(s[0] / len(ids), s[1] / len(ids), len(ids)) for name, s in sums.items()}


def _accumulate(sums: dict[str, npt.NDArray[np.float64]], streams: dict[str, Iterator[Logits]]) -> None:
    for rows in zip(*streams.values(), strict=True):
        chunk = dict(zip(streams, rows, strict=True))
        exact = _log_softmax(chunk.pop("reference"))
        for name, logits in chunk.items():
            other = _log_softmax(logits)
            sums[name][0] += (np.exp(exact) * (exact - other)).sum()
            sums[name][1] += (exact.argmax(-1) == other.argmax(-1)).sum()


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def _runner(backend: Backend, spec: ModelSpec, window: int) -> Callable[[list[int]], Iterator[Logits]]:
    """Each call starts a fresh sequence and yields logits chunk by chunk."""
    layout = KVLayout(16, tuple((b.attention.num_kv_heads, b.attention.head_dim) for b in spec.blocks), "f16")
    num_blocks = -(-window // layout.block_size)
    backend.reserve_kv(layout, num_blocks * layout.block_bytes)
    table = np.arange(num_blocks, dtype=np.int32)[None]

    def run(ids: list[int]) -> Iterator[Logits]:
        for begin in range(0, len(ids), CHUNK):
            chunk = np.asarray(ids[begin : begin + CHUNK], np.int32)
            rows = np.arange(len(chunk), dtype=np.int32)
            starts = np.asarray([0, len(chunk)], np.int32)
            context = np.asarray([begin + len(chunk)], np.int32)
            yield backend.logits(backend.forward(Batch(chunk, rows + begin, starts, context, table, rows)))

    return run


def _llama_cpp(path: Path, window: int) -> Callable[[list[int]], Iterator[Logits]]:
    import llama_cpp

    llama: Any = llama_cpp.Llama(str(path), n_ctx=window, logits_all=True, verbose=False, n_threads=2)

    def run(ids: list[int]) -> Iterator[Logits]:
        llama.reset()
        llama.eval(ids)
        for begin in range(0, len(ids), CHUNK):
            yield np.array(llama.scores[begin : min(begin + CHUNK, len(ids))], np.float32)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--isa", default="", help="comma-separated kernel tables; default: the best of this CPU")
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    tables = args.isa.split(",") if args.isa else ()
    found = measure(args.model, args.tokens, args.window, not args.no_peer, tables)
    print(f"{'backend':<12}{'mean KL':>12}{'top-1':>10}{'tokens':>8}")
    for name, d in found.items():
        print(f"{name:<12}{d.kl:>12.6f}{100 * d.top1:>9.2f}%{d.num_tokens:>8}")
    print(json.dumps({"model": args.model.name, **{name: asdict(d) for name, d in found.items()}}))


if __name__ == "__main__":
    main()
