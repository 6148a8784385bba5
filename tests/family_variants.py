"""Folders of tests/tiny_families.py with other keys in config.json: what transformers and the reference make of it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import ModelError
from tests.parity.test_families import IDS, logits_of
from tests.tiny_families import VISION, family_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Float32 = npt.NDArray[np.float32]
ABSENT = object()


class Models:
    """One folder for each family, and what changed copies of its config.json make of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.base = cache(lambda family: family_folder(family, 0, folder)[1])

    def changed(self, family: str, changes: dict[str, Any]) -> Path:
        """The folder of a family with other keys; its weights are linked."""
        base, path = self.base(family), self._folder / "changed"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "model.safetensors").symlink_to(base / "model.safetensors")
        config = json.loads((base / "config.json").read_text())
        text = config["text_config"] if family in VISION else config
        for key, value in changes.items():
            text.pop(key, None)
            if value is not ABSENT:
                text[key] = _layer_types(text) if value == "sliding" else value
        (path / "config.json").write_text(json.dumps(config))
        return path


def _layer_types(config: dict[str, Any]) -> list[str]:
    count = (
        config.get("num_hidden_layers")
        or config.get("n_layer")
        or config.get("num_layers")
        or len(config["layers_block_type"])
    )
    return ["sliding_attention", "full_attention"] * (count // 2) + ["sliding_attention"] * (count % 2)


def theirs(path: Path, family: str) -> Float32 | None:
    """The logits of transformers; None where it does not load or run the model."""
    kind = transformers.AutoModelForImageTextToText if family in VISION else transformers.AutoModelForCausalLM
    try:
        model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits: Float32 = model(torch.tensor([IDS])).logits[0].numpy()
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ZeroDivisionError):
        return None
    return logits


def ours(path: Path) -> Float32 | None:
    """The logits of the reference; None where the model is refused."""
    try:
        return logits_of(ReferenceBackend(), path)
    except ModelError:
        return None
