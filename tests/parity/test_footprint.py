"""Peak memory of one answer, held against the size of the file; of a quantised file, against the largest tensor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvarn import LLM
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.quantization.moments import MAX_BYTES
from tests.assets import qwen_coder, smollm2
from tests.float_model import write_text
from tests.float_source import float_source

if TYPE_CHECKING:
    from tests.conftest import Record

pytestmark = pytest.mark.model

NUM_TOKENS = 32
ALLOWANCE = 150_000_000  # Python, its libraries, scratch
MOMENTS_OF = ("attn_q.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")  # one reader of each input


@pytest.mark.parametrize("model", [smollm2, qwen_coder], ids=lambda model: model.__name__)
def test_peak_memory_stays_near_the_size_of_the_file(model: Callable[[], Path], record: Record) -> None:
    path = model()
    options = ["-t", "0", "-n", str(NUM_TOKENS), "Why is the sky blue?"]
    peak = _peak_bytes([sys.executable, "-m", "kvarn.cli.main", "run", "-m", str(path), *options])
    record(f"peak-memory-{model.__name__}", {"peak_bytes": peak, "file_bytes": path.stat().st_size})
    assert peak <= 1.3 * path.stat().st_size + 2 * NUM_TOKENS * _kv_bytes_per_token(path) + ALLOWANCE


def test_tensors_are_streamed_through_a_quantisation(is_long: bool, record: Record, tmp_path: Path) -> None:
    """Long form: a source of more bytes than it may take memory."""
    source = float_source("qwen-coder") if is_long else smollm2()
    file = GGUFFile(source)
    largest = max(info.num_bytes for info in file.tensors.values())
    file.close()
    options = ["Q4_K_M", "--requantize", "-o", str(tmp_path / "out.gguf")]
    peak = _peak_bytes([sys.executable, "-m", "kvarn.cli.main", "quantize", str(source), *options])
    record("peak-memory-quantize", {"peak_bytes": peak, "largest_tensor_bytes": largest})
    assert peak <= 3 * largest + 2 * ALLOWANCE


@pytest.mark.long
@pytest.mark.parametrize("method", ["size", "gptq", "awq", "smoothquant"])
def test_what_measures_holds_the_model_and_moments(method: str, record: Record, tmp_path: Path) -> None:
    """The model in its own types, at most 1 GiB of second moments for gptq and awq, and tensors that are streamed."""
    source = float_source("smollm2")
    file = GGUFFile(source)
    largest = max(info.num_bytes for info in file.tensors.values())
    inputs = [info.shape for name, info in file.tensors.items() if name.endswith(MOMENTS_OF)]
    moments = min(MAX_BYTES, sum(4 * columns**2 for _, columns in inputs)) if method in ("gptq", "awq") else 0
    file.close()
    text = write_text(tmp_path / "text.txt", num_words=4000)
    target = ["--bpw", "5.5"] if method == "size" else ["Q4_K_M", "--method", method]
    options = [*target, "--text", str(text), "-o", str(tmp_path / "out.gguf")]
    peak = _peak_bytes([sys.executable, "-m", "kvarn.cli.main", "quantize", str(source), *options])
    figures = {"peak_bytes": peak, "source_bytes": source.stat().st_size, "largest_tensor_bytes": largest}
    record(f"peak-memory-quantize-{method}", figures | {"moments_bytes": moments})
    assert peak <= 1.3 * source.stat().st_size + moments + 3 * largest + 2 * ALLOWANCE


# A child starts with its parent's peak, so the parent must be small: a bare interpreter.
WATCHER = """
import os, sys
_, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def _peak_bytes(command: list[str]) -> int:
    watched = [sys.executable, "-I", "-c", WATCHER, *command]
    done = subprocess.run(watched, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return int(done.stderr.split()[-1])


def _kv_bytes_per_token(path: Path) -> int:
    from tests.running import layout_of

    with LLM(str(path), context=512) as llm:
        return layout_of(llm.spec, "f16").token_bytes
