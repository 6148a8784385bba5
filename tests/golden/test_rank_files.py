"""Real lists of ranks: the ids that tiktoken gives to difficult texts."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
import tiktoken

from kvarn.formats.open import open_weights
from kvarn.tokenizer.encoders.bytelevel import text_bytes
from kvarn.tokenizer.encoders.pretokenize import RULES
from kvarn.tokenizer.from_folder import tokenizer_from_folder
from tests.assets import llama_cpp_models, tekken
from tests.golden.test_token_ids import cases

pytestmark = pytest.mark.model

NUM_RANKS = 30_000  # of Qwen's 151,643: any first part of a list of ranks is one


def texts() -> list[str]:
    rng = random.Random(3)
    words = [word for text, _ in cases("qwen2") for word in text.split(" ")]
    mixed = [" ".join(rng.choices(words, k=20)) for _ in range(40)]
    return [text for text, _ in cases("qwen2")] + mixed


@pytest.mark.parametrize(("name", "pre"), [("TikTokenTokenizer", "kimi-k2"), ("ChatGLM4Tokenizer", "chatglm-bpe")])
def test_ranks_of_a_real_vocabulary_give_tiktokens_ids(name: str, pre: str, tmp_path: Path) -> None:
    source = open_weights(llama_cpp_models() / "ggml-vocab-qwen2.gguf")
    tokens = [text_bytes(text) for text in list(source.metadata["tokenizer.ggml.tokens"])[:NUM_RANKS]]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokenizer = tokenizer_from_folder(tmp_path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    oracle = tiktoken.Encoding(name, pat_str=RULES[pre].patterns[0], mergeable_ranks=ranks, special_tokens={})
    wrong = [text for text in texts() if tokenizer.encode(text) != oracle.encode_ordinary(text)]
    assert not wrong


def test_tekken_of_mistral_nemo_gives_the_ids_of_its_own_package() -> None:
    """Mistral's package runs tiktoken over the same list and puts its special tokens before it."""
    data = json.loads((tekken() / "tekken.json").read_text(encoding="utf-8"))
    config, tokenizer = data["config"], tokenizer_from_folder(tekken())
    num_special = config["default_num_special_tokens"]
    used = data["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in used}
    oracle = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    assert tokenizer.vocab_size == config["default_vocab_size"]
    for text in texts():
        expected = [num_special + token_id for token_id in oracle.encode_ordinary(text)]
        assert tokenizer.encode(text, add_special=False) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
