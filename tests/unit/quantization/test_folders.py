"""Hugging Face folders in, GGUF out: the same tokens and the same logits, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

import kvarn
from kvarn.errors import UnsupportedModel
from kvarn.formats.gguf.reader import GGUFFile
from tests.chat_model import chat_metadata
from tests.tiny_models import CONFIGS, random_tensors

TEXT = "It's 12 o'clock:\n\n  naïve café, def f(x): return x  你好"


def write_folder(path: Path, arch: str, *, bos: bool = False, **changes: Any) -> Path:
    """A folder whose vocabulary is the 256 bytes, a merge and two special tokens."""
    letters = chat_metadata()["tokenizer.ggml.tokens"][:256]
    vocab = {letter: index for index, letter in enumerate(letters)} | {"th": 256}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    config = CONFIGS[arch] | {"vocab_size": 259} | changes
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    tensors = {name: values.astype(np.float16) for name, values in random_tensors(arch, config).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "arch", ["llama", "llama-tied", "llama3", "llama-linear", "mixtral", "qwen2", "qwen3", "qwen3moe"]
)
def test_a_folder_as_gguf_scores_as_the_folder_does(arch: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", arch, bos=arch == "qwen3")
    kvarn.quantize(folder, "F16", tmp_path / "out.gguf")
    found = []
    for model in (folder, tmp_path / "out.gguf"):
        with kvarn.LLM(model, backend="native", context=128) as llm:
            ids = llm.tokenizer.encode(TEXT)
            found.append((ids, llm.tokenizer.eos_ids, llm.tokenizer.chat_template, llm.score(ids)))
    assert found[0][:3] == found[1][:3]
    np.testing.assert_allclose(found[0][3], found[1][3], atol=2e-3)
    assert np.abs(found[0][3]).max() > 1


def test_vectors_become_f32_and_matrices_the_type(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "qwen2")
    kvarn.quantize(folder, "Q8_0", tmp_path / "out.gguf")
    types = {name: info.type.name for name, info in GGUFFile(tmp_path / "out.gguf").tensors.items()}
    assert {types[name] for name in types if name.endswith((".bias", "_norm.weight"))} == {"F32"}
    assert types["blk.0.attn_q.weight"] == "Q8_0"


def test_an_architecture_that_is_not_written_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"gemma2.*convert_hf_to_gguf\.py"):
        kvarn.quantize(write_folder(tmp_path / "folder", "gemma2"), "Q8_0", tmp_path / "out.gguf")


def test_a_scaling_of_positions_that_is_not_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="scaling of positions"):
        kvarn.quantize(write_folder(tmp_path / "folder", "qwen2-yarn"), "Q8_0", tmp_path / "out.gguf")


def test_a_tokenizer_that_has_no_name_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModel, match="byte-level BPE"):
        kvarn.quantize(folder, "Q8_0", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
