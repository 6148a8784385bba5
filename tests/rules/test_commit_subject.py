"""The commit-msg hook accepts the subjects CONTRIBUTING.md describes, and is installed with the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.commit_subject import complaint
from tests.rules.tree import ROOT


@pytest.mark.parametrize("subject", ["kv: share partial blocks copy-on-write", "server, http: one error", "Merge x"])
def test_a_good_subject_is_accepted(subject: str) -> None:
    assert complaint(f"{subject}\n\nWhy.\n") is None


@pytest.mark.parametrize("subject", ["", "share blocks", "kv: share blocks.", "kv:", "kv: " + "x" * 69])
def test_a_bad_subject_is_refused_with_a_reason(subject: str, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "rules" / "commit_subject.py"), str(message)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "the subject" in done.stderr


def test_the_hook_is_configured() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "default_install_hook_types: [pre-commit, commit-msg]" in config
    assert "tests/rules/commit_subject.py" in config
