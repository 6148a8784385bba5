"""The same file again, by every method and for a size: in another process, on another number of threads.

Run as a program it makes the files: python -m tests.unit.quantization.test_same_bytes FOLDER THREADS
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvarn
from tests.float_model import write_float_model, write_text

NAMES = ("imatrix", "rtn", "weighted", "awq", "smoothquant", "gptq", "size", "size-gptq")
ROOT = Path(__file__).parents[3]


def make(folder: Path, threads: int) -> None:
    """One file by each of NAMES."""
    source = write_float_model(folder / "source.gguf", width=64, hidden=256)
    text, matrix = write_text(folder / "text.txt", seed=1, num_words=2000), folder / "imatrix"
    few = kvarn.ImatrixOptions(chunks=8, context=64, threads=threads)
    kvarn.collect_imatrix(source, matrix, text=text, options=few)
    size = kvarn.SizeTarget(bits_per_weight=6.0)
    made: dict[str, tuple[str | kvarn.SizeTarget, kvarn.QuantizeOptions]] = {
        "rtn": ("Q4_K_M", kvarn.QuantizeOptions(threads=threads)),
        "weighted": ("Q4_K_M", kvarn.QuantizeOptions(threads=threads, imatrix=matrix)),
        "size": (size, kvarn.QuantizeOptions(threads=threads, imatrix=matrix, text=text)),
        "size-gptq": (size, kvarn.QuantizeOptions(threads=threads, imatrix=matrix, text=text, method="gptq")),
    }
    for method in ("awq", "smoothquant", "gptq"):
        made[method] = "Q4_K_M", kvarn.QuantizeOptions(threads=threads, imatrix=matrix, text=text, method=method)
    for name, (target, options) in made.items():
        kvarn.quantize(source, target, folder / name, options=options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One made on one thread, one on two, with sets and dicts of another order."""
    folders, running = [], []
    for threads in (1, 2):
        folders.append(tmp_path_factory.mktemp(f"on-{threads}"))
        command = [sys.executable, "-m", "tests.unit.quantization.test_same_bytes", str(folders[-1]), str(threads)]
        environment = os.environ | {"PYTHONHASHSEED": str(threads), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    assert [process.wait() for process in running] == [0, 0]
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_processes_and_threads_change_no_byte(folders: list[Path], name: str) -> None:
    first, second = ((folder / name).read_bytes() for folder in folders)
    assert first == second


def test_every_method_makes_a_file_of_its_own(folders: list[Path]) -> None:
    assert len({(folders[0] / name).read_bytes() for name in NAMES}) == len(NAMES)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
