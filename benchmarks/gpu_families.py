"""Tiny models of every family on a GPU: in bfloat16 beside float32 on the CPU, and bit by bit in company and chunks.

    python -m benchmarks.gpu_families [--share 0/4] [--backend cuda] [--out FILE.json] [NAME ...]

--share: every fourth family, since compiling takes most of the time and processes can share it. Needs transformers and
pytest, which the tests' models are made with, and no native core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

if "gguf" not in sys.modules:
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.modules["gguf"] = types.ModuleType("gguf")  # the tiny models need it for GGUF files only

from tests.diffusion_models import DIFFUSION, tiny_diffusion
from tests.running import batch_of, hidden_states, layout_of
from tests.tiny_encoders import FAMILIES as ENCODER_FAMILIES
from tests.tiny_encoders import encoder_folder
from tests.tiny_families import FAMILIES, family_folder
from tests.tiny_models import ARCHITECTURES, tiny_model

from benchmarks.gpu_check import without_timing
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.device import Device, choose_device
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe

LENGTH, VOCAB, BLOCKS = 100, 110, 40
ENCODER_LENGTH, ENCODER_VOCAB = 40, 80
ENCODER = "encoder-"  # before the name of a family, which may be one of decoders, too
ENCODERS = ("bert", *(ENCODER + family for family in ENCODER_FAMILIES))
CHUNKS = ((40, 60), (80, *[1] * 20), (*[7] * 14, 2))


def make(name: str, folder: Path) -> Path:
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


def compare(name: str, folder: Path, gpu: Device) -> dict[str, Any]:
    path = make(name, folder)
    on_cpu, on_gpu = (load(device, path) for device in (Device(torch.device("cpu"), torch.float32), gpu))
    rng = np.random.default_rng(0)
    length, vocabulary = (ENCODER_LENGTH, ENCODER_VOCAB) if name in ENCODERS else (LENGTH, VOCAB)
    ids, other = (rng.integers(3, vocabulary, length).tolist() for _ in range(2))
    tables = rng.permutation(BLOCKS)[:16].reshape(2, 8).astype(np.int32)
    wanted = on_cpu.forward(batch_of([(ids, 0)], tables[:1])).float()
    whole = on_gpu.forward(batch_of([(ids, 0)], tables[:1]))
    company = on_gpu.forward(batch_of([(other, 0), (ids, 0)], tables[::-1]))[length:]
    found = {
        "distance": round(float((whole.float().cpu() - wanted).norm() / wanted.norm()), 4),
        "company": torch.equal(company, whole),
    }
    if name not in ENCODERS and name not in DIFFUSION:
        for chunks in CHUNKS:
            parts = torch.cat(list(hidden_states(on_gpu, tables[:1], ids, chunks)))  # type: ignore[arg-type]
            found[f"chunks of {chunks[0]}"] = torch.equal(parts, whole)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    first, _, step = given.share.partition("/")
    names = given.names or [*ARCHITECTURES, *DIFFUSION, *FAMILIES, *ENCODERS[1:]][int(first) :: int(step)]
    results: dict[str, Any] = {}
    if given.backend == "cuda":
        without_timing()
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = compare(name, Path(folder), choose_device(given.backend))
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(f"{time.perf_counter() - started:5.1f} s", name, results[name], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
