"""The Python in the documents is real: every block runs as printed, on real models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.assets import minilm, smollm2
from tests.rules.tree import ROOT, shown

pytestmark = pytest.mark.model

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MAX_EXAMPLE_LINES = 40


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md"])
def test_python_in_a_document_runs(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    assert blocks
    code = "\n".join(blocks)
    for alias, path in (("smollm2", smollm2()), ("minilm", minilm())):
        code = code.replace(f'LLM("{alias}"', f"LLM({str(path)!r}")
    names: dict[str, object] = {}
    exec(compile(code, document, "exec"), names)
    assert getattr(names["vectors"], "shape", None) == (2, 384)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=shown)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_EXAMPLE_LINES
