"""`kvarn run --lora` and `kvarn show` of an adapter, as processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lora_files import chat_model_pairs, write_gguf_adapter, write_peft
from tests.unit.cli.conftest import Kvarn

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """The same adapter as a folder and as a GGUF file."""
    pairs = chat_model_pairs(0)
    folder = write_peft(tmp_path / "sql", pairs)
    return {"peft": str(folder), "gguf": str(write_gguf_adapter(tmp_path / "sql.gguf", CONFIG, "llama", pairs))}


def test_an_adapter_changes_the_answer_whatever_its_form(kvarn: Kvarn, model: str, adapters: dict[str, str]) -> None:
    asked = ("run", "-m", model, "--temperature", "0", "--max-tokens", "8", "--json", "hello")
    plain, *adapted = (
        json.loads(kvarn(*asked, *how).stdout)["token_ids"]
        for how in ((), ("--lora", adapters["peft"]), ("--lora", adapters["gguf"]))
    )
    assert adapted[0] == adapted[1] != plain


def test_show_tells_rank_targets_and_base(kvarn: Kvarn, adapters: dict[str, str]) -> None:
    for path, base, target in ((adapters["peft"], "tests/tiny", "q_proj"), (adapters["gguf"], "Tiny", "attn_q")):
        done = kvarn("show", path)
        text = done.stdout.decode()
        assert done.returncode == 0, done.stderr
        for part in ("rank", "4", "scale", "1.5", base, target):
            assert part in text


def test_an_adapter_that_is_not_there_is_one_sentence(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, "--lora", "no-such-adapter", "hello")
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvarn: adapter 'no-such-adapter' is not here")
