"""`kvarn fill` as a process."""

from __future__ import annotations

import json
import re

from tests.unit.cli.conftest import Kvarn


def test_the_command_line_prints_the_text(kvarn: Kvarn) -> None:
    done = kvarn("fill", "{{name}} is {{age}}.", "--slot", "name=Tom|Lily", "--slot", "age=/[1-9]/", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert re.fullmatch(r"(Tom|Lily) is [1-9]\.", told["text"])
    wrong = kvarn("fill", "{{name}}", "--slot", "name")
    assert wrong.returncode == 2
    assert b"NAME=/REGEX/" in wrong.stderr
