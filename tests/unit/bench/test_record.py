"""benchmarks/record.py: what a command printed becomes a result, or nothing is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.record import record


def test_the_last_line_of_json_is_kept_with_the_command_but_no_folders(tmp_path: Path) -> None:
    script = tmp_path / "speeds.py"
    script.write_text("print('{\"row\": 1}')\nprint('decode 12')\nprint('{\"row\": 2}')\nprint('done')")
    found = json.loads(record("speeds", [sys.executable, str(script), "--rounds", "3"], tmp_path).read_text())
    assert found["figures"] == {"row": 2}
    assert found["command"] == f"{Path(sys.executable).name} speeds.py --rounds 3"
    assert {"commit", "machine", "date"} <= found.keys()


@pytest.mark.parametrize("code", ["print('no figures')", "print('{}'); raise SystemExit(1)"])
def test_nothing_is_written_for_a_command_that_failed_or_found_nothing(code: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing is written"):
        record("speeds", [sys.executable, "-c", code], tmp_path)
    assert not list(tmp_path.iterdir())
