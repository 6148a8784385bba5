"""The torch backend on a GPU, in one run: same bytes in every company, speed.

    python -m benchmarks.gpu_check [windows] [same] [bench] [--shape qwen3-0.6b] [--shape llama-8b] [--no-times]

Needs no native core, and pytest for `windows` alone; benchmarks.gpu_families has every family. Weights are random;
`windows` and --no-times take the first kernel of each product. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvarn.backends.batch import Batch, KVLayout, RowSampling, SampleRows
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.device import Device, choose_device
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.models.cache_cost import windowed_layers
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
}
COMMON = {"hidden_act": "silu", "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2}


Span = tuple[int, int, int]  # sequence, first position, end


class RandomWeights:
    """A WeightSource of bf16 numbers that repeat every few million."""

    path = "random"

    def __init__(self, config: Mapping[str, Any], tied: bool) -> None:
        self.metadata = {"hf": {**COMMON, **config, "tie_word_embeddings": tied}}
        self.tensors = {name: TensorInfo(name, TensorType.BF16, shape) for name, shape in _shapes(config, tied)}
        values = torch.randn(7_340_033, generator=torch.Generator().manual_seed(0)) * 0.02
        self._bytes = values.bfloat16().view(torch.uint8).numpy()
        self._ones = torch.ones(1 << 16).bfloat16().view(torch.uint8).numpy()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.tensors[name]
        source = self._ones if len(info.shape) == 1 else self._bytes
        return np.resize(source, info.num_bytes)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        return torch.from_numpy(self.raw(name)).view(torch.bfloat16).float().reshape(self.tensors[name].shape).numpy()

    def release_pages(self, names: Iterable[str]) -> None: ...

    def verify_unchanged(self) -> None: ...

    def close(self) -> None: ...


def _shapes(c: Mapping[str, Any], tied: bool) -> Iterable[tuple[str, tuple[int, ...]]]:
    width, hidden = c["hidden_size"], c["intermediate_size"]
    dim = c.get("head_dim", width // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield "token_embd.weight", (c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        layer = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (q, width), "attn_k": (kv, width)}
        layer |= {"attn_v": (kv, width), "attn_output": (width, q)}
        layer |= {"ffn_gate": (hidden, width), "ffn_up": (hidden, width), "ffn_down": (width, hidden)}
        if c["model_type"] == "qwen3":
            layer |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in layer.items())
    yield "output_norm.weight", (width,)
    if not tied:
        yield "output.weight", (c["vocab_size"], width)


def layout(spec: ModelSpec, block_size: int = 16, dtype: str = "bf16") -> KVLayout:
    layers = tuple((block.attention.num_kv_heads, block.attention.head_dim) for block in spec.blocks)
    return KVLayout(block_size, layers, dtype)


def load(device: Device, source: Any, num_blocks: int, block_size: int = 16) -> tuple[TorchBackend, ModelSpec]:
    description = describe(source)
    backend = TorchBackend(device, 8)
    backend.load(description.spec, description.weights)
    shape = layout(description.spec, block_size)
    backend.reserve_kv(shape, num_blocks * shape.block_bytes)
    return backend, description.spec


def spans_batch(spans: Sequence[tuple[Sequence[int], int]], tables: Any, only_last: bool = False) -> Batch:
    lengths = [len(ids) for ids, _ in spans]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in spans])
    positions = np.concatenate([np.arange(first, first + len(ids), dtype=np.int32) for ids, first in spans])
    ends = np.array([first + len(ids) for ids, first in spans], np.int32)
    rows = starts[1:] - 1 if only_last else np.arange(starts[-1], dtype=np.int32)
    return Batch(ids, positions, starts, ends, np.asarray(tables, np.int32), rows.astype(np.int32))


def without_timing() -> None:
    """Take the first kernel of each product, and capture steps when they are met: all kernels have the same bits."""
    from kvarn.backends.torch.cuda.choose import Matmuls
    from kvarn.backends.torch.cuda.quantized.matmuls import QuantizedMatmuls

    Matmuls.tune = QuantizedMatmuls.tune_quantized = lambda *_: None  # type: ignore[method-assign]
    TorchBackend._warm_up = lambda *_: None  # type: ignore[method-assign]


def windows(results: dict[str, Any], device: Device, archs: Sequence[str] = ("gemma3", "gemma2", "phi3")) -> None:
    """Layers that keep their window only: the same bits as with everything kept, for prompts in chunks and decodes.

    Blocks before a window are freed by hand and given to the other sequence, as the engine would.
    """
    from tests.tiny_models import tiny_model

    from kvarn.formats.open import open_weights

    ids = np.random.default_rng(3).integers(3, 160, (2, 260)).tolist()
    steps = [
        [(0, 0, 100)],
        [(0, 100, 200), (1, 0, 60)],
        *[[(0, 200 + i, 201 + i), (1, 60 + i, 61 + i)] for i in range(40)],
    ]
    for arch in archs:
        with tempfile.TemporaryDirectory() as folder:
            description = describe(open_weights(tiny_model(arch, Path(folder), "safetensors")))
            spec = description.spec
            backend = TorchBackend(device, 8)
            backend.load(spec, description.weights)
            for size, dtype in ((16, "f16"), (64, "bf16")):
                found, pools = [], []
                for is_freed in (False, True):
                    shape = layout(spec, size, dtype)
                    if is_freed:
                        shape = replace(shape, windowed=windowed_layers(spec), num_window_blocks=512 // size)
                    backend.reserve_kv(shape, 1024 // size * shape.block_bytes)
                    pools.append(WindowPool(size, max(block.attention.window or 0 for block in spec.blocks)))
                    found.append([backend.forward(pools[-1].batch(ids, spans, is_freed)) for spans in steps])
                is_same = all(torch.equal(*pair) for pair in zip(*found, strict=True))
                told = {"same": is_same, "blocks held": pools[-1].most_held, "freed": pools[-1].num_freed}
                results[f"windows/{arch}/{size}"] = told
                print("windows", arch, "blocks of", size, told, flush=True)
            backend.close()


class WindowPool:
    """Window tables of two sequences; blocks in front of the window and a tile of keys go back after every step."""

    def __init__(self, size: int, window: int) -> None:
        self.free, self.size, self.window = list(range(512 // size)), size, window
        self.tables = np.full((2, 320 // size), -1, np.int32)
        self.most_held = self.num_freed = 0

    def batch(self, ids: Sequence[Sequence[int]], spans: Sequence[Span], is_freed: bool) -> Batch:
        owners = [owner for owner, _, _ in spans]
        full = np.arange(self.tables.size, dtype=np.int32).reshape(self.tables.shape)[owners]
        made = spans_batch([(ids[owner][first:end], first) for owner, first, end in spans], full)
        if not is_freed:
            return made
        for owner, first, end in spans:
            for column in range(-(-end // self.size)):
                begin = max(0, first + 1 - self.window) // 64 * 64
                if (column + 1) * self.size <= begin and self.tables[owner, column] >= 0:
                    self.free.append(int(self.tables[owner, column]))
                    self.tables[owner, column] = -1
                    self.num_freed += 1
                elif column * self.size >= first // self.size * self.size and self.tables[owner, column] < 0:
                    self.tables[owner, column] = self.free.pop(0)
        self.most_held = max(self.most_held, int((self.tables >= 0).sum(axis=1).max()))
        return replace(made, window_tables=self.tables[owners].copy())


def same(results: dict[str, Any], name: str, backend: TorchBackend, spec: ModelSpec) -> None:
    """One request of 700 tokens and 40 decoded: alone, in company of 37, in chunks; hidden states bit by bit."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, spec.vocab_size, n).tolist() for n in (700, *rng.integers(5, 900, 37))]
    tables = np.arange(38 * 64).reshape(38, 64)
    answers = []
    for count, chunk in ((1, 4096), (38, 777), (12, 150), (1, 37)):
        fed, states = [list(prompt) for prompt in prompts[:count]], []
        done = [0] * count
        while len(states) < 40:
            spans, owners = _next_spans(fed, done, chunk)
            batch = spans_batch([(fed[i][first:end], first) for i, first, end in spans], tables[owners], only_last=True)
            hidden = backend.forward(batch)
            tokens = _greedy(backend, hidden)
            for row, (i, _, end) in enumerate(spans):
                done[i] = end
                if end == len(fed[i]):
                    fed[i].append(int(tokens[row]))
                    if i == 0:
                        states.append(hidden[row].clone())
        answers.append((fed[0][700:], torch.stack(states)))
    tokens, states = answers[0]
    verdict = [(found == tokens, torch.equal(there, states)) for found, there in answers[1:]]
    ways = ("company of 37, chunks of 777", "company of 11, chunks of 150", "chunks of 37")
    results[f"same/{name}"] = dict(zip(ways, verdict, strict=True))
    print(name, results[f"same/{name}"], flush=True)


def _next_spans(fed: Sequence[list[int]], done: Sequence[int], chunk: int) -> tuple[list[Span], list[int]]:
    spans = []
    for i, ids in enumerate(fed):
        size = min(len(ids) - done[i], chunk)
        if size > 0:
            spans.append((i, done[i], done[i] + size))
            chunk -= size
    return spans, [span[0] for span in spans]


def _greedy(backend: TorchBackend, hidden: torch.Tensor) -> npt.NDArray[np.int32]:
    count = len(hidden)
    params = tuple(RowSampling() for _ in range(count))
    return backend.sample(hidden, SampleRows(np.arange(count, dtype=np.int32), params)).token_ids


def bench(results: dict[str, Any], name: str, backend: TorchBackend, spec: ModelSpec, steps: int = 64) -> None:
    """Decode at several batch sizes from a prompt of 128, with greedy sampling; prompts of 2,048."""
    rng = np.random.default_rng(2)
    for count in (1, 8, 32, 128, 256):
        tables = np.arange(count * 32).reshape(count, 32)
        lengths = [128] * count
        last = rng.integers(3, spec.vocab_size, count)
        for warm in (True, False):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for step in range(4 if warm else steps):
                spans = [([int(last[i])], lengths[i] + step) for i in range(count)]
                hidden = backend.forward(spans_batch(spans, tables))
                last = _greedy(backend, hidden)
            seconds = time.perf_counter() - started
        speed, step_ms = count * steps / seconds, 1e3 * seconds / steps
        results[f"decode/{name}/{count}"] = {"tok_s": round(speed, 1), "ms": round(step_ms, 3)}
        print(name, count, results[f"decode/{name}/{count}"], flush=True)
    for rows in (512, 2048):
        ids, table = rng.integers(3, spec.vocab_size, 2048).tolist(), np.arange(128)[None]
        for warm in (True, False):
            started = time.perf_counter()
            for _ in range(1 if warm else 4):
                for at in range(0, 2048, rows):
                    backend.forward(spans_batch([(ids[at : at + rows], at)], table, only_last=True))
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        results[f"prefill/{name}/{rows}"] = round(4 * 2048 / seconds)
        print(name, "prefill", rows, results[f"prefill/{name}/{rows}"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--shape", action="append")
    parser.add_argument("--no-times", action="store_true")
    given = parser.parse_args()
    parts = given.parts or ["windows", "same", "bench"]
    device = choose_device("cuda")
    if given.no_times or parts == ["windows"]:
        without_timing()
    results: dict[str, Any] = {"device": device.title, "torch": torch.__version__}
    if "windows" in parts:
        windows(results, device)
    for name in given.shape or ["qwen3-0.6b", "llama-8b"]:
        if {"same", "bench"} & set(parts):
            started = time.perf_counter()
            backend, spec = load(device, RandomWeights(SHAPES[name], tied=name.startswith("qwen3")), 8200)
            results[f"load_s/{name}"] = round(time.perf_counter() - started, 1)
            print(name, "loaded in", results[f"load_s/{name}"], flush=True)
            if "bench" in parts:
                bench(results, name, backend, spec)
            if "same" in parts:
                same(results, name, backend, spec)
            backend.close()
            del backend
    print(json.dumps(results))


if __name__ == "__main__":
    main()
