"""Token ids that llama.cpp makes of difficult texts with vocabularies that come without golden files.

`python -m tests.golden.llama_cpp_ids` writes them to llama_cpp_ids.json; it needs llama-cpp-python (see PEERS in the
Makefile). The texts are those of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.assets import llama_cpp_models

GOLDEN = Path(__file__).with_suffix(".json")
NAMES = ("aquila", "gpt-neox", "baichuan", "nomic-bert-moe")


def golden() -> dict[str, Any]:
    """Texts, and for each vocabulary the ids of every text."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def llama_cpp_ids(name: str, texts: list[str]) -> list[list[int]]:
    """What llama.cpp makes of texts: nothing added, no control token read from a text."""
    from llama_cpp import Llama

    model = Llama(str(llama_cpp_models() / f"ggml-vocab-{name}.gguf"), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode("utf-8"), add_bos=False, special=False) for text in texts]


def written(texts: list[str], ids: dict[str, list[list[int]]]) -> str:
    """The file, with a line for each text."""
    lists = {name: ",\n      ".join(map(json.dumps, rows)) for name, rows in ids.items()}
    inner = ",\n".join(f'    "{name}": [\n      {rows}\n    ]' for name, rows in lists.items())
    shown = ",\n    ".join(map(json.dumps, texts))
    return f'{{\n  "texts": [\n    {shown}\n  ],\n  "ids": {{\n{inner}\n  }}\n}}\n'


def main() -> None:
    texts = golden()["texts"]
    GOLDEN.write_text(written(texts, {name: llama_cpp_ids(name, texts) for name in NAMES}), encoding="utf-8")


if __name__ == "__main__":
    main()
