"""Helper processes hold all their limits, also where the system allows less than one of them asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvarn

PACKAGE = Path(kvarn.__file__).parent
CHILDREN = {
    "structured/grammar_sandbox_child.py": "limit_resources(1 << 28, 5)",
    "tokenizer/folder_sandbox_child.py": "limit_resources(1 << 28, 5)",
    "tokenizer/chat/template_child.py": "limit_memory(1 << 28)",
    "server/collections/document_reader_child.py": "limit(1 << 28, 5)",
}
LIMITED = """
import importlib.util, resource
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
spec = importlib.util.spec_from_file_location("child", {path!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child.{call}
names = (resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_AS)
print(*(value for name in names for value in resource.getrlimit(name)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("script", CHILDREN)
def test_a_lower_limit_of_the_system_leaves_the_others_in_place(script: str) -> None:
    code = LIMITED.format(path=str(PACKAGE / script), call=CHILDREN[script])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    soft_core, hard_core, soft_cpu, hard_cpu, soft_memory, hard_memory = map(int, done.stdout.split())
    assert (soft_core, hard_core) == (0, 0)
    assert (soft_cpu, hard_cpu) == (3, 3)
    assert 1 << 28 < soft_memory == hard_memory < 1 << 32
