"""Tiny vocabularies of every kind, as the metadata a GGUF file would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.tokenizer.encoders.bytelevel import byte_of_character

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """Every byte, a few merges, the ChatML tokens and one user-defined token."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "i m", "Ã ©"]
    joined = [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*byte_of_character(), *joined, *special, "<tool>"]
    kinds = [NORMAL] * (256 + len(joined)) + [CONTROL] * len(special) + [USER]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.chat_template": CHATML,
        **more,
    }


PIECES = (
    "▁",
    "a",
    "b",
    "c",
    "é",
    "ab",
    "bc",
    "abc",
    "▁a",
    "▁ab",
    "aa",
    "aaa",
    "▁▁",
    "ca",
    ">",
    "<",
    "/",
    "s",
    "</",
    "s>",
)


def sentence_piece(pieces: Sequence[str] = PIECES, **more: Any) -> dict[str, Any]:
    """Bytes, then pieces, the earlier the better their score."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(place) for place in range(len(pieces))],
        **more,
    }


def word_piece(**more: Any) -> dict[str, Any]:
    """Words and continuations in GGUF's spelling."""
    words = ["▁hello", "▁world", "▁un", "aff", "able", "▁,", "▁[", "▁]", "▁mask", "▁é", "▁日"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*special, *words],
        "tokenizer.ggml.token_type": [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * len(words),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
        **more,
    }
