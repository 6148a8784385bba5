"""Tiny models whose embedding has more rows than their tokenizer has tokens, as Hugging Face folders often have.

    0 .. 255   bytes          256, 257   a hole in the tokenizer's table
    258        end of text    259        mask of the diffusion models      260 .. 319  padding

The padding's rows of the head are the largest: nearly every choice would fall on one of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.diffusion_models import tiny_diffusion
from tests.tiny_models import CONFIGS, random_tensors

ROWS, END, MASK = 320, 258, 259
UNUSED = frozenset({256, 257, *range(260, ROWS)})
LOUDER = 5.0  # times the other rows of the head


def padded_model(arch: str, folder: Path) -> Path:
    """Write one and return its folder."""
    path = _diffusion(arch, folder) if arch in ("dream", "sdar") else _autoregressive(arch, folder)
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"].copy()
    head[sorted(UNUSED)] *= LOUDER
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path)
    return path


def _autoregressive(arch: str, folder: Path) -> Path:
    config: dict[str, Any] = CONFIGS[arch] | {"vocab_size": ROWS, "eos_token_id": END, "bos_token_id": None}
    path = folder / arch
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(arch, config), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _diffusion(arch: str, folder: Path) -> Path:
    return tiny_diffusion(arch, folder, vocab_size=ROWS, mask_token_id=MASK, eos_token_id=END)


def _write_tokenizer(path: Path) -> None:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters | {"<end>": END, "<mask>": MASK}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<mask>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert not {tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<mask>")} & UNUSED
    assert np.all([tokenizer.id_to_token(i) is None for i in UNUSED])
