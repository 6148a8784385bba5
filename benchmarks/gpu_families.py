"""Tiny models of every family on a GPU: in bfloat16 beside float32 on the CPU, and bit by bit in company and chunks.

    python -m benchmarks.gpu_families [--share 0/4] [--backend cuda] [--models DIR] [--out FILE.json] [NAME ...]

--share: every fourth family, since compiling takes most of the time and processes can share it. --models: where models
lie already, by name (`--write DIR` makes them), for families that the transformers there does not know. Needs
transformers and pytest, which the tests' models are made with, and no native core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

if "gguf" not in sys.modules:
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.modules["gguf"] = types.ModuleType("gguf")  # the tiny models need it for GGUF files only

from tests.canvas_models import CANVASES, canvas_batch, canvas_folder
from tests.canvas_models import TEXT as CANVAS_SHAPES
from tests.diffusion_models import DIFFUSION, tiny_diffusion
from tests.running import batch_of, hidden_states, layout_of
from tests.tiny_encoders import FAMILIES as ENCODER_FAMILIES
from tests.tiny_encoders import encoder_folder
from tests.tiny_families import FAMILIES, family_folder
from tests.tiny_models import ARCHITECTURES, tiny_model

from benchmarks.gpu_check import without_timing
from kvarn.backends.batch import Batch, Canvases, RowSampling, SampleRows
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.device import Device, choose_device
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe

LENGTH, VOCAB, BLOCKS = 100, 110, 40
ENCODER_LENGTH, ENCODER_VOCAB = 40, 80
ENCODER = "encoder-"  # before the name of a family, which may be one of decoders, too
ENCODERS = ("bert", *(ENCODER + family for family in ENCODER_FAMILIES))
CANVAS = "canvas-"  # before the number of a model that denoises canvases of random tokens
CANVAS_MODELS = tuple(f"{CANVAS}{shape}" for shape in range(len(CANVAS_SHAPES)))
CHUNKS = ((40, 60), (80, *[1] * 20), (*[7] * 14, 2))


def make(name: str, folder: Path, models: Path | None = None) -> Path:
    """The folder of a model: the one that lies in `models`, else a new one."""
    if models is not None and (models / name).is_dir():
        return models / name
    if name.startswith(CANVAS):
        return canvas_folder(int(name.removeprefix(CANVAS)), folder)[1]
    if name.startswith(ENCODER):
        return encoder_folder(name.removeprefix(ENCODER), 0, folder)[1]
    if name in DIFFUSION:
        return tiny_diffusion(name, folder, "safetensors")
    if name in ARCHITECTURES:
        return tiny_model(name, folder, "safetensors")
    return family_folder(name, 0, folder)[1]


def load(device: Device, path: Path) -> TorchBackend:
    description = describe(open_weights(path))
    backend = TorchBackend(device, 1)
    backend.load(description.spec, description.weights)
    layout = layout_of(description.spec, "bf16" if device.kind == "cuda" else "f32")
    backend.reserve_kv(layout, BLOCKS * layout.block_bytes)
    return backend


def compare(name: str, path: Path, gpu: Device) -> dict[str, Any]:
    on_cpu, on_gpu = (load(device, path) for device in (Device(torch.device("cpu"), torch.float32), gpu))
    if name in CANVAS_MODELS:
        return compare_canvases(on_cpu, on_gpu, CANVASES[int(name.removeprefix(CANVAS))])
    rng = np.random.default_rng(0)
    length, vocabulary = (ENCODER_LENGTH, ENCODER_VOCAB) if name in ENCODERS else (LENGTH, VOCAB)
    ids, other = (rng.integers(3, vocabulary, length).tolist() for _ in range(2))
    tables = rng.permutation(BLOCKS)[:16].reshape(2, 8).astype(np.int32)
    wanted = on_cpu.forward(batch_of([(ids, 0)], tables[:1])).float()
    whole = on_gpu.forward(batch_of([(ids, 0)], tables[:1]))
    company = on_gpu.forward(batch_of([(other, 0), (ids, 0)], tables[::-1]))[length:]
    found = {
        "distance": _distance(whole, wanted),
        "median_row": _median_row(whole, wanted),
        "company": torch.equal(company, whole),
    }
    if name not in ENCODERS and name not in DIFFUSION:
        for chunks in CHUNKS:
            parts = torch.cat(list(hidden_states(on_gpu, tables[:1], ids, chunks)))  # type: ignore[arg-type]
            found[f"chunks of {chunks[0]}"] = torch.equal(parts, whole)
    return found


def compare_canvases(on_cpu: TorchBackend, on_gpu: TorchBackend, length: int) -> dict[str, Any]:
    """A prompt with a canvas behind it, at once and in two parts, and a second step fed with the first's scores."""
    rng = np.random.default_rng(0)
    text, canvas, other = (rng.integers(3, VOCAB, count).tolist() for count in (23, length, length))
    tables = rng.permutation(BLOCKS)[:16].reshape(2, 8).astype(np.int32)
    found: dict[str, Any] = {}
    wanted, whole = (one.forward(canvas_batch(text, canvas, tables[:1])) for one in (on_cpu, on_gpu))
    found["distance"] = _distance(whole, wanted)
    fed = [_feedback(one, hidden) for one, hidden in ((on_cpu, wanted), (on_gpu, whole))]
    again = canvas_batch(text, other, tables[:1], first=len(text), feedback=fed[1])
    wanted = on_cpu.forward(canvas_batch(text, other, tables[:1], first=len(text), feedback=fed[0]))
    behind = on_gpu.forward(again)
    found["distance with feedback"] = _distance(behind, wanted)
    at_once = on_gpu.forward(canvas_batch(text, other, tables[1:], feedback=fed[1]))
    found["text behind and in the step"] = torch.equal(at_once, behind)
    both = on_gpu.forward(_joined(canvas_batch(other, canvas, tables[1:]), again))
    found["company"] = torch.equal(both[length:], behind)
    return found


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return round(float((found.float().cpu() - wanted.float()).norm() / wanted.float().norm()), 4)


def _median_row(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The distance of a row: where a rounded score chose another expert than in float32, which is rare, it is large."""
    apart = (found.float().cpu() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    return round(float(apart.median()), 4)


def _feedback(backend: TorchBackend, hidden: torch.Tensor) -> object:
    count = len(hidden)
    params = tuple(RowSampling(temperature=0.8, seed=5, position=i) for i in range(count))
    rows = SampleRows(np.arange(count, dtype=np.int32), params, canvas_starts=np.array([0, count], np.int32))
    return backend.sample(hidden, rows).canvases[0].feedback


def _joined(one: Batch, other: Batch) -> Batch:
    """Two batches of one sequence each as one."""
    parts = ("token_ids", "positions", "context_lens", "block_tables")
    joined = {name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in parts}
    assert one.canvases is not None
    assert other.canvases is not None
    canvases = Canvases(
        np.concatenate([one.canvases.starts, other.canvases.starts]), (*one.canvases.feedback, *other.canvases.feedback)
    )
    count = len(one.token_ids)
    starts = np.array([0, count, count + len(other.token_ids)], np.int32)
    rows = np.concatenate([one.output_rows, count + other.output_rows])
    return Batch(row_starts=starts, output_rows=rows, canvases=canvases, **joined)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--write", type=Path, metavar="DIR", help="models there and nothing else")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    first, _, step = given.share.partition("/")
    every = list(dict.fromkeys([*ARCHITECTURES, *DIFFUSION, *CANVAS_MODELS, *FAMILIES, *ENCODERS[1:]]))
    names = given.names or every[int(first) :: int(step)]
    if given.write is not None:
        return _write(names, given.write)
    results: dict[str, Any] = {}
    if given.backend == "cuda":
        without_timing()
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = compare(name, make(name, Path(folder), given.models), choose_device(given.backend))
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(f"{time.perf_counter() - started:5.1f} s", name, results[name], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))
    return None


def _write(names: Sequence[str], models: Path) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(make(name, Path(folder)), models / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
