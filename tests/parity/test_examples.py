"""Every example runs as it is, in a process of its own, on real models; those of clients in tests/server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.assets import minilm, smollm2

pytestmark = pytest.mark.model

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = [path for path in sorted(FOLDER.glob("*.py")) if "http://" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    code = path.read_text(encoding="utf-8")
    for alias, model in (("smollm2", smollm2), ("minilm", minilm)):
        if f'"{alias}"' in code:
            code = code.replace(f'"{alias}"', repr(str(model())))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
