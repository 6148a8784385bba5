"""Loading a kvarn.LLM: options that are refused or warned of, and a file that changes meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

import kvarn
from kvarn import LLM
from tests.chat_model import write_chat_model
from tests.padded_models import padded_model
from tests.tiny_models import tiny_model
from tests.unit.tokenizer.test_from_folder import saved


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize(("threads", "is_told"), [(1, False), (1000, True), (None, False)])
def test_more_threads_than_cpus_are_warned_of(
    path: Path, threads: int | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(path), backend="reference", threads=threads):
        assert ("threads is 1,000, more than the CPUs this process may use" in caplog.text) == is_told


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_file_written_to_while_it_is_loaded_is_not_served(path: Path, tmp_path: Path, backend: str) -> None:
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(path.read_bytes())

    def touch(done: int, total: int | None, label: str) -> None:
        os.utime(copy, ns=(1, 1))

    with pytest.raises(kvarn.FormatError, match="written to while it was read"):
        LLM(str(copy), backend=backend, progress=touch)


@pytest.mark.parametrize("options", [{"threads": 0}, {"context": -5}, {"backend": "gpu"}, {"kv_bytes": 0}], ids=str)
def test_wrong_options_are_refused_before_anything_is_loaded(options: dict[str, Any]) -> None:
    with pytest.raises(kvarn.ConfigError):
        LLM("no such model", **options)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("token_id", [320, 400])
def test_an_added_token_beyond_the_rows_of_the_model_is_never_chosen(
    backend: str, token_id: int, tmp_path: Path
) -> None:
    path = padded_model("llama", tmp_path)
    written = json.loads((path / "tokenizer.json").read_text())
    written["added_tokens"] += [{**written["added_tokens"][0], "id": token_id, "content": "<pad>"}]
    (path / "tokenizer.json").write_text(json.dumps(written))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<pad>"}))
    with LLM(str(path), backend=backend) as llm:
        answer = llm.generate("some text", kvarn.SamplingParams(max_tokens=4, min_tokens=3))
        assert len(answer.token_ids) == 4
        with pytest.raises(kvarn.InvalidParameter, match=f"token id {token_id} in the prompt is outside"):
            llm.generate(llm.tokenizer.encode("<pad>", parse_special=True))


REFUSED_LOADS = """
import sys
from pathlib import Path
import kvarn

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def refused(path):
    try:
        kvarn.LLM(path, context=10**6)
    except kvarn.ConfigError as error:
        return error

refused(sys.argv[1])  # everything is imported
before = status("VmRSS")
kept = [refused(sys.argv[2]) for _ in range(4)]
assert None not in kept
print(status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_refused_loads_give_their_memory_back_also_where_the_errors_are_kept(tmp_path: Path) -> None:
    folders = [tiny_model(arch, tmp_path) for arch in ("llama", "mistral")]
    for folder, size in zip(folders, (100, 60_000), strict=True):
        words = {"a": 0} | {f"word{number:06}": number for number in range(1, size)}
        saved(Tokenizer(models.WordLevel(words, unk_token="a")), folder)
    command = [sys.executable, "-c", REFUSED_LOADS, *map(str, folders)]
    kept, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert kept < 0.65 * peak, (kept, peak)  # half of it at most so far; all of it where errors keep their loads
