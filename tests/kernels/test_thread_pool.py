"""The one thread pool of the process; its races under the thread sanitizer: every task once, none lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvarn.backends.native import _native

ROOT = Path(__file__).parents[2]
POOL = ROOT / "csrc" / "base"
STRESS = """
#include "thread_pool.h"
#include <chrono>
int main() {
    kvarn::ThreadPool pool(2);
    std::vector<int> runs(64);
    for (int round = 0; round < 20000; ++round) {
        if (round == 500) pool.grow(3);
        if (round == 1000) pool.grow(4);
        int count = 1 + round % 50, limit = round < 1000 ? 2 : 1 + round / 7 % 4;
        std::fill(runs.begin(), runs.end(), 0);
        kvarn::Claim claim = round % 3 == 0 ? kvarn::Claim::one : kvarn::Claim::neighbours;
        pool.run(count, limit, claim, [&](int i, int worker) { runs[i] += worker < limit ? 1 : 100; });
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


def test_teams_of_several_models_share_one_pool_of_the_largest_size() -> None:
    before = _native.pool_threads()
    teams = [_native.ThreadTeam(before), _native.ThreadTeam(before + 1), _native.ThreadTeam(1)]
    assert [team.num_threads for team in teams] == [before, before + 1, 1]
    assert _native.pool_threads() == before + 1


def test_a_forked_child_has_a_pool_that_computes() -> None:
    """The parent's threads do not exist in the child; its pool must not wait for them."""
    code = """
import os, sys
from pathlib import Path
from tests.chat_model import write_chat_model
import kvarn
path = write_chat_model(Path(sys.argv[1]) / "tiny.gguf")
params = kvarn.SamplingParams(max_tokens=4, temperature=0.0)
with kvarn.LLM(path, threads=3) as llm:
    expected = llm.generate("ab", params).text
    child = os.fork()
    if child == 0:
        os._exit(0 if kvarn.LLM(path, threads=2).generate("ab", params).text == expected else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0
