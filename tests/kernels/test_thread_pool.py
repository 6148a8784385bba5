"""The thread pool under the thread sanitizer: every task once, none lost, no data race."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

POOL = Path(__file__).parents[2] / "csrc" / "base"
STRESS = """
#include "thread_pool.h"
#include <chrono>
int main() {
    kvarn::ThreadPool pool(3);
    std::vector<int> runs(64);
    for (int round = 0; round < 20000; ++round) {
        int count = 1 + round % 50;
        std::fill(runs.begin(), runs.end(), 0);
        pool.run(count, [&](int i, int) { ++runs[i]; });
        for (int i = 0; i < 64; ++i) if (runs[i] != (i < count)) return 1;
        if (round % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers fall asleep
    }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with its thread sanitizer")
def test_every_task_runs_exactly_once_without_a_race(tmp_path: Path) -> None:
    source, binary = tmp_path / "stress.cpp", tmp_path / "stress"
    source.write_text(STRESS)
    flags = ["-std=c++20", "-O1", "-fsanitize=thread", f"-I{POOL}", "-o", str(binary), "-lpthread"]
    subprocess.run(["g++", str(source), str(POOL / "thread_pool.cpp"), *flags], check=True)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
