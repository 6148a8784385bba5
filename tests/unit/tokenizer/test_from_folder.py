"""Tokenizers of Hugging Face folders give the ids the tokenizers package gives, minus the control tokens of users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.tokenizer.from_folder import tokenizer_from_folder


def byte_level() -> Tokenizer:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, "he": 256}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["<tool>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, **{f"<0x{i:02X}>": 5 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "hello": 3, "wor": 4, "##ld": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("make", "text"), [(byte_level, "hé he"), (metaspace, "a a日b"), (word_piece, "Hello WORLD")])
def test_ids_are_those_of_the_tokenizers_package(make: Any, text: str, tmp_path: Path) -> None:
    theirs = make()
    ours = tokenizer_from_folder(saved(theirs, tmp_path))
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text).ids)


def test_control_tokens_are_parsed_only_on_demand_and_as_the_package_does(tmp_path: Path) -> None:
    theirs = metaspace()
    ours = tokenizer_from_folder(saved(theirs, tmp_path))
    assert ours.encode("a<s>a", parse_special=True) == theirs.encode("a<s>a").ids
    assert theirs.token_to_id("<s>") not in ours.encode("a<s>a")


def test_added_tokens_that_are_not_special_are_always_found(tmp_path: Path) -> None:
    theirs = byte_level()
    ours = tokenizer_from_folder(saved(theirs, tmp_path))
    assert theirs.token_to_id("<tool>") in ours.encode("a<tool>")


def test_bos_eos_and_template_come_from_the_configuration(tmp_path: Path) -> None:
    theirs = byte_level()
    config = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages[0].content }}"}
    ours = tokenizer_from_folder(saved(theirs, tmp_path, **config))
    assert ours.bos_id == theirs.token_to_id("<s>")
    assert ours.eos_ids == (theirs.token_to_id("<|end|>"),)
    assert ours.chat_template == "{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text("separate")
    assert tokenizer_from_folder(tmp_path).chat_template == "separate"


def test_several_templates_in_the_configuration_mean_the_default_one(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert tokenizer_from_folder(saved(byte_level(), tmp_path, chat_template=templates)).chat_template == "yes"


def test_generation_config_names_more_tokens_that_end(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path, eos_token="<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 5]}))
    assert set(tokenizer_from_folder(folder).eos_ids) == {258, 5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**9}))
    with pytest.raises(FormatError, match="eos_token_id"):
        tokenizer_from_folder(folder)


def test_more_tokens_than_the_model_has_rows_for_are_refused(tmp_path: Path) -> None:
    folder = saved(word_piece(), tmp_path)
    with pytest.raises(FormatError, match="rows"):
        tokenizer_from_folder(folder, num_rows=5)
    assert tokenizer_from_folder(folder, num_rows=8).vocab_size == 8


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a zz"]}},
        {"model": {"type": "Nonsense", "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "vocab": {"a": 3999999}, "merges": []}},
        {"added_tokens": [{"id": "x", "content": "a"}]},
        {"added_tokens": [{"id": 10**12, "content": "a"}]},
        {"added_tokens": 5},
        {"post_processor": {"type": "BertProcessing", "cls": ["a", 10**6], "sep": ["b", 1]}},
        {"post_processor": {"type": "BertProcessing"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zz"}}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_a_bad_tokenizer_json_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(word_piece(), tmp_path)
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer_json, **change}))
    with pytest.raises(FormatError):
        tokenizer_from_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_files_that_are_not_json_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


def test_a_folder_without_tokenizer_json_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
