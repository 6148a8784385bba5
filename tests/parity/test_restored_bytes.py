"""Cold, warm and restored: the same tokens and the same bits of their log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn import Completion, SamplingParams
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.engine.engine import Engine
from tests.parity.test_same_bytes import KINDS, TinyModel, prompts, same
from tests.persisting import close, hash_key, keep_on_disk
from tests.submitting import submit

MAKERS: dict[str, Callable[[int], Backend]] = {"native": NativeBackend, "reference": lambda _: ReferenceBackend()}
MODELS = [
    *(("native", "llama", dtype) for dtype in ("f16", "f32", "q8_0")),
    ("native", "qwen3moe", "f16"),
    *(("reference", "llama", dtype) for dtype in ("f16", "q8_0")),
]


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    submit(engine, prompt, params)
    found = []
    while engine.has_work:
        found += [event.completion for event in engine.step() if event.completion is not None]
        time.sleep(engine.wait_s)
    return found[0]


@KINDS
@pytest.mark.parametrize(("backend", "arch", "kv_dtype"), MODELS)
def test_restored_blocks_give_the_bytes_of_computed_ones(
    tmp_path: Path, backend: str, arch: str, kv_dtype: str, params: SamplingParams
) -> None:
    model, folder = TinyModel(arch, tmp_path, MAKERS[backend]), tmp_path / "cache"
    (prompt,) = prompts(1, seed=3, low=75, high=76)
    found, contents = [], []
    for _ in range(2):  # two processes
        engine = model.engine(kv_dtype=kv_dtype, hash_key=hash_key(folder))
        disk = keep_on_disk(engine, folder)
        found += [answer(engine, prompt, params) for _ in range(2)]
        contents.append([content.tobytes() for _, content in disk._export(engine.kv.digests(prompt))])
        close(disk)
    assert [one.usage.cached_tokens for one in found] == [0, 64, 64, 64]
    assert [one.token_ids for one in found] == [found[0].token_ids] * 4
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4
    # NumPy's products round differently with the number of rows and where an array lies; the native kernels do not.
    assert same(found[1:], found[:1] * 3) or backend == "reference"
