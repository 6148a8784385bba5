"""Lists of ranks: what tiktoken makes of small ones, and files that are refused."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from kvarn.errors import FormatError, KvarnError, UnsupportedModel
from kvarn.tokenizer.encoders.pretokenize import RULES
from kvarn.tokenizer.from_folder import tokenizer_from_folder
from kvarn.tokenizer.rank_files import NUM_LLAMA_RANKS

WORDS = (
    b"th",
    b"the",
    b" t",
    b" the",
    b"he",
    b"in",
    b"ing",
    b"\xe6\x97",
    b"\xe6\x97\xa5",
    b"  ",
    b"    ",
    b"'s",
    b"12",
)
TOKENS = [*(bytes([byte]) for byte in range(256)), *WORDS]
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(TOKENS)): {"content": "[BOS]", "special": True},
        str(len(TOKENS) + 1): {"content": "[EOS]", "special": True},
        str(len(TOKENS) + 5): {"content": "<|tool_call_begin|>", "special": False},
    },
}


def lines(tokens: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def folder(path: Path, file: str, text: str, config: Any = None) -> Path:
    (path / file).write_text(text)
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_kimi_folder_has_tiktokens_ids_and_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(folder(tmp_path, "tiktoken.model", lines(TOKENS), KIMI))
    oracle = tiktoken.Encoding(
        "kimi",
        pat_str=RULES["kimi-k2"].patterns[0],
        mergeable_ranks={token: rank for rank, token in enumerate(TOKENS)},
        special_tokens={},
    )
    rng = random.Random(1)
    alphabet = [*"theing 's12\n\t", " the", "日本", "日", "é", "\U0001f600", "HELLO", "World's", "!!"]
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 30)))
        assert tokenizer.encode(text) == oracle.encode_ordinary(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(TOKENS) + 256
    assert tokenizer.encode("[BOS]a[EOS]", parse_special=True) == [len(TOKENS), ord("a"), len(TOKENS) + 1]
    assert tokenizer.encode("[BOS]") == oracle.encode_ordinary("[BOS]")
    assert tokenizer.token_text(len(TOKENS) + 2) == f"<|reserved_token_{len(TOKENS) + 2}|>"
    assert not tokenizer.is_control(len(TOKENS) + 5)
    assert tokenizer.eos_ids[0] == len(TOKENS) + 1


@pytest.mark.parametrize(("name", "end"), [("QWenTokenizer", "<|endoftext|>"), ("HYTokenizer", "<|eos|>")])
def test_special_tokens_of_known_classes_stand_behind_the_ranks(name: str, end: str, tmp_path: Path) -> None:
    made = folder(tmp_path, "qwen.tiktoken", lines(TOKENS), {"tokenizer_class": name})
    tokenizer = tokenizer_from_folder(made)
    assert tokenizer.token_text(len(TOKENS)) == "<|endoftext|>"
    assert tokenizer.token_text(tokenizer.eos_ids[0]) == end
    assert tokenizer.encode(f"the{end}", parse_special=True) == [TOKENS.index(b"the"), tokenizer.eos_ids[0]]


def test_the_original_file_of_llama_3_is_known_by_its_size(tmp_path: Path) -> None:
    more = [f"word{index}".encode() for index in range(NUM_LLAMA_RANKS - len(TOKENS))]
    tokenizer = tokenizer_from_folder(folder(tmp_path, "tokenizer.model", lines([*TOKENS, *more])))
    assert tokenizer.encode("the") == [128_000, TOKENS.index(b"the")]
    assert (tokenizer.token_text(128_009), tokenizer.token_text(128_255)) == (
        "<|eot_id|>",
        "<|reserved_special_token_246|>",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lines(TOKENS)[:-5] + "\n", "line 269"),
        ("AA== 0\n????\n", "line 2"),
        ("AA== 0\nA=== 1\n", "line 2|base64"),
        (lines(TOKENS) + "AA== 269\n", "occurs twice"),
        (lines(TOKENS) + "YWI= 3\n", "rank 3 occurs twice"),
        (lines(TOKENS) + "YWI= 400\n", "rank 269 is missing"),
        (lines(TOKENS[1:]), "1 of the 256 single bytes"),
        (lines([*TOKENS, b"x" * 5000]), "5,000 bytes"),
        ("AAA 0\n" + lines(TOKENS), "base64|twice"),
    ],
)
def test_broken_lists_are_refused_with_the_place(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=reason):
        tokenizer_from_folder(folder(tmp_path, "tiktoken.model", text, KIMI))


@pytest.mark.parametrize("config", [None, {"tokenizer_class": "Stranger"}, {"tokenizer_class": 7}])
def test_a_list_that_does_not_say_how_to_split_text_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="tokenizer_class"):
        tokenizer_from_folder(folder(tmp_path, "tiktoken.model", lines(TOKENS), config))


@pytest.mark.parametrize(
    "added",
    [
        {"5": {"content": "<x>", "special": True}},
        {"-1": {"content": "<x>"}},
        {"300": {"content": 3}},
        {"300": {"content": "<x>"}, "301": {"content": "<x>"}},
        {"9999999": {"content": "<x>"}},
        [],
        "x",
    ],
)
def test_special_tokens_that_make_no_sense_are_refused(added: Any, tmp_path: Path) -> None:
    config = {**KIMI, "added_tokens_decoder": added}
    made = folder(tmp_path, "tiktoken.model", lines(TOKENS), config)
    if added == []:
        assert tokenizer_from_folder(made).bos_id is None
        return
    with pytest.raises(KvarnError):
        tokenizer_from_folder(made)


def test_a_list_of_another_model_is_refused_without_the_name_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text(lines(TOKENS))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(KIMI))
    with pytest.raises(FormatError, match="120 rows for tokens; the tokenizer is of another model") as caught:
        tokenizer_from_folder(tmp_path).fitted(120)
    assert "tokenizer.json" not in str(caught.value)


def test_two_lists_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, "a.tiktoken", lines(TOKENS), KIMI)
    with pytest.raises(FormatError, match=r"a\.tiktoken, tiktoken\.model"):
        tokenizer_from_folder(folder(tmp_path, "tiktoken.model", lines(TOKENS)))


def tekken(**changes: Any) -> dict[str, Any]:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(TOKENS)]
    config = {
        "pattern": RULES["tekken"].patterns[0],
        "default_vocab_size": 20 + 260,
        "default_num_special_tokens": 20,
    }
    return {"config": {**config, **changes.pop("config", {})}, "vocab": vocab, **changes}


def test_tekken_has_its_special_tokens_first_and_a_bos(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(folder(tmp_path, "tekken.json", json.dumps(tekken())))
    assert tokenizer.vocab_size == 280
    assert tokenizer.encode("the") == [1, 20 + TOKENS.index(b"the")]
    assert tokenizer.encode("[INST]", parse_special=True, add_special=False) == [3]
    assert tokenizer.token_text(tokenizer.eos_ids[0]) == "</s>"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": {"pattern": "(a+)+$"}}, "pattern"),
        ({"config": {"default_vocab_size": 10**9}}, "default_vocab_size"),
        ({"config": {"default_vocab_size": 5000}}, "do not fill"),
        ({"config": {"default_num_special_tokens": -1}}, "default_num_special_tokens"),
        ({"config": {"default_vocab_size": 100}}, "single bytes"),
        ({"vocab": [{"rank": 0}] * 300}, "no token"),
        ({"vocab": "x"}, "do not fill"),
        ({"special_tokens": [{"rank": 0, "token_str": "a"}] * 2}, "special token"),
        ({"special_tokens": [{"rank": 99, "token_str": "a"}]}, "special token"),
        ({"special_tokens": 3}, "special_tokens"),
    ],
)
def test_broken_tekken_files_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(KvarnError, match=reason):
        tokenizer_from_folder(folder(tmp_path, "tekken.json", json.dumps(tekken(**changes))))
