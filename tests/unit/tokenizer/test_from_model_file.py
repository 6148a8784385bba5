"""Folders with tokenizer.model: the ids are those of sentencepiece; what it does that is not known is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.errors import FormatError, KvarnError, UnsupportedModel
from kvarn.tokenizer.from_folder import tokenizer_from_folder

spm = pytest.importorskip("sentencepiece")
TEXTS = ("The quick brown fox", "  two  spaces", "naïve café 你好", "", "a\nb\tc", "<s> and </s> are text", "12345")
SIZE = 400


def train(folder: Path, **options: Any) -> Path:
    """A small model of this file's own text."""
    folder.mkdir(exist_ok=True)
    settings = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    settings |= {"byte_fallback": True, "vocab_size": SIZE, "minloglevel": 2, "hard_vocab_limit": False}
    sentences = Path(__file__).read_text(encoding="utf-8").splitlines() * 3
    prefix = str(folder / "tokenizer")
    spm.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_prefix=prefix, **(settings | options))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("bpe"))


@pytest.mark.parametrize("text", TEXTS)
def test_the_ids_are_those_of_sentencepiece(text: str, folder: Path) -> None:
    theirs = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = tokenizer_from_folder(folder)
    assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
    assert ours.decode(theirs.encode(text)) == text
    assert ours.eos_ids == (theirs.eos_id(),)


def test_a_model_without_a_first_space(tmp_path: Path) -> None:
    path = train(tmp_path, add_dummy_prefix=False)
    theirs = spm.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    assert tokenizer_from_folder(path).encode("The quick fox")[1:] == theirs.encode("The quick fox")


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False, "vocab_size": 600},  # tokens of several words
    ],
)
def test_a_unigram_model_cuts_as_sentencepiece_does(options: dict[str, Any], tmp_path: Path) -> None:
    path = train(tmp_path, model_type="unigram", **options)
    theirs, ours = spm.SentencePieceProcessor(model_file=str(path / "tokenizer.model")), tokenizer_from_folder(path)
    for text in (*TEXTS, "x = [1, 2]  # ﬁne ＡＢＣ\u3000½  ", "   ", "f" * 3000):
        assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
    assert ours.decode(ours.encode("The quick fox")) == "The quick fox"
    config = {"add_bos_token": False, "add_eos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_from_folder(path).encode("fox") == [*theirs.encode("fox"), theirs.eos_id()]


def _copy(folder: Path, target: Path, **files: Any) -> Path:
    (target / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


def test_the_other_files_of_the_folder_are_read(folder: Path, tmp_path: Path) -> None:
    size = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).vocab_size()
    added = {
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 1): {"content": "<|im_end|>", "special": True},
    }
    config = {
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": "{{ x }}",
    }
    path = _copy(
        folder,
        tmp_path,
        tokenizer_config=config,
        added_tokens={"<tool>": size + 2},
        generation_config={"eos_token_id": [2, size + 1]},
    )
    ours = tokenizer_from_folder(path, num_rows=size + 8)
    assert len(ours.vocabulary.tokens) == size + 8
    assert set(ours.eos_ids) == {2, size + 1}
    assert ours.chat_template == "{{ x }}"
    assert size not in ours.encode("<|im_start|>hi")
    assert ours.encode("<|im_start|>hi", parse_special=True)[0] == size
    assert size + 2 in ours.encode("hi <tool>")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model_type": "word"}, "word"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"normalization_rule_name": "nmt_nfkc"}, "precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_what_would_make_other_tokens_is_refused_by_name(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        tokenizer_from_folder(train(tmp_path, **options))


def test_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"neither tokenizer\.json nor tokenizer\.model.*tekken\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens": {"<tool>": -1}}, r"added_tokens\.json"),
        ({"added_tokens": {"<tool>": 10**9}}, r"added_tokens\.json"),
        ({"added_tokens": {"<tool>": 5}}, "token 5 is"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}}, r"tokenizer_config\.json"),
        ({"tokenizer_config": {"added_tokens_decoder": {"٣": {"content": "x"}}}}, r"tokenizer_config\.json"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder"),
        ({"generation_config": {"eos_token_id": [3, 4, 5, 6]}}, "eos_token_id"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(
    files: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((FormatError, UnsupportedModel), match=reason):
        tokenizer_from_folder(_copy(folder, tmp_path, **files))


def test_damage_is_refused_and_never_another_error(folder: Path, tmp_path: Path) -> None:
    whole, rng = (folder / "tokenizer.model").read_bytes(), np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for _ in range(rng.integers(0, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "tokenizer.model").write_bytes(bytes(data))
        try:
            tokenizer_from_folder(tmp_path).encode("The quick brown fox")
            outcomes.add("read")
        except KvarnError as error:
            outcomes.add(type(error).__name__)
    assert "FormatError" in outcomes
    assert outcomes <= {"read", "FormatError", "UnsupportedModel"}
