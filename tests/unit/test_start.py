"""What a cold process loads before its first token: counts, since seconds are another machine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model

MAX_MODULES = 580  # of Python, NumPy, tokenizers and Kvarn
MAX_OURS = 300
OF_OTHER_WORK = (
    *("asyncio", "ssl", "http.client", "multiprocessing", "email.message", "unittest"),
    *("torch", "transformers", "huggingface_hub", "safetensors", "llguidance", "fastapi", "rich", "typer"),
    *("kvarn.server", "kvarn.retrieval", "kvarn.engine.process.messages", "kvarn.engine.delivery"),
    *("kvarn.prefix_store.store", "kvarn.decoding.diffusion", "kvarn.decoding.uniform", "kvarn.fill"),
    *("kvarn.reranking", "kvarn.tokenizer.from_folder", "kvarn.async_llm"),
)
ANSWER = """
import json, sys
from kvarn import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    text = llm.generate("ab", SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    print(json.dumps([len(text.token_ids), sorted(sys.modules)]))
"""
RUN = """
import json, sys
from kvarn.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def modules(model: Path) -> set[str]:
    """Those of a process that has loaded a model and answered one token."""
    num_tokens, names = json.loads(_output(ANSWER, str(model)))
    assert num_tokens == 1
    return set(names)


@pytest.mark.parametrize("name", OF_OTHER_WORK)
def test_a_first_token_needs_nothing_of_other_work(modules: set[str], name: str) -> None:
    assert name not in modules


def test_a_first_token_needs_few_modules(modules: set[str]) -> None:
    assert len(modules) <= MAX_MODULES
    assert sum(name.startswith("kvarn") for name in modules) <= MAX_OURS


def test_run_loads_no_other_command(model: Path) -> None:
    written = _output(RUN, "run", "ab", "--raw", "--model", str(model), "--max-tokens", "1")
    names = json.loads(written.splitlines()[-1])
    commands = {name for name in names if name.startswith("kvarn.cli.") and not name.startswith("kvarn.cli.terminal")}
    assert "kvarn.cli.generate.run" in commands
    assert not {name for name in commands if name.startswith(("kvarn.cli.serving", "kvarn.cli.bench", "kvarn.cli.wei"))}
    assert not {"fastapi", "http.client", "asyncio"} & set(names)


def test_blas_threads_do_not_keep_a_core_busy_after_a_start() -> None:
    code = "import os, kvarn; kvarn.LLM; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    assert _output(code).strip() == "20"


def test_a_server_begins_without_the_schemas_of_its_document() -> None:
    code = """
from pydantic import BaseModel
written = []
BaseModel.model_json_schema = classmethod(lambda model, **_: written.append(model.__name__))
import kvarn.server.app
print(written)
"""
    assert _output(code).strip() == "[]"


def _output(code: str, *args: str) -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
