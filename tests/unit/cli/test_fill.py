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


def test_a_middle_is_written_by_a_diffusion_model(kvarn: Kvarn) -> None:
    asked = ("run", "--model", "tiny-diffusion", "--max-tokens", "8", "--suffix", " and they played in the park.")
    done = kvarn(*asked, "One day, a little ", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["text"].strip()
    assert "park" not in told["text"]
    assert told["usage"]["completion_tokens"] <= 8
    shown = kvarn(*asked, "One day, a little ")
    assert shown.stdout.decode().rstrip("\n") == told["text"]
    watched = kvarn(*asked, "One day, a little ", "--watch")
    assert (watched.returncode, b"--suffix" in watched.stderr) == (2, True), watched.stderr


def test_pins_and_sparse_caches_are_given_as_json(kvarn: Kvarn) -> None:
    asked = ("run", "--raw", "--model", "tiny-diffusion", "--max-tokens", "24", "Tom and his dog", "--diffusion")
    done = kvarn(*asked, 'pinned={"8": " They were happy."}', "--diffusion", 'sparse={"retention_ratio": 0.5}')
    assert done.returncode == 0, done.stderr
    assert b" They were happy." in done.stdout
    for wrong in ("pinned=8", 'pinned={"x": 1}', 'sparse={"ratio": 1}'):
        refused = kvarn(*asked, wrong)
        assert refused.returncode == 2, wrong
        assert b"--diffusion" in refused.stderr


def test_a_slot_without_a_rule_is_refused(kvarn: Kvarn) -> None:
    wrong = kvarn("fill", "{{name}}", "--slot", "name")
    assert wrong.returncode == 2
    assert b"NAME=/REGEX/" in wrong.stderr
