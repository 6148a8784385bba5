"""The key file: what is drawn, written, read and refused, and the command line that edits it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.errors import ConfigError
from kvarn.server.access.keyfile import KEY_PREFIX, draw_key, parse_keys, read_keys, write_keys
from kvarn.server.access.keys import KeyRing
from tests.unit.server.ringing import add, bearer, refusal


def test_the_file_holds_no_key_and_only_its_owner_reads_it(file: Path) -> None:
    key = add(file, "alice")
    text = file.read_text()
    assert key[len(KEY_PREFIX) + 5 :] not in text
    assert key[: len(KEY_PREFIX) + 4] in text
    assert file.stat().st_mode & 0o077 == 0


def test_keys_are_drawn_with_256_bits_and_never_twice() -> None:
    drawn = {draw_key("x", "free")[0] for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(len(key) == len(KEY_PREFIX) + 43 for key in drawn)


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys = 3", "keys"),
        ("[other]\nx = 1", "other"),
        ("[[keys]]\nname = 3", "name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST[1:]}"\ntier = "pro"', "64 hexadecimal"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST[:-1]}X"\ntier = "pro"', "64 hexadecimal"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"', "tier"),
        (f'[[keys]]\nname = ""\nsha256 = "{DIGEST}"\ntier = "pro"', "name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\ngroup = ""', "group"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\nexpires = "soon"', "expires"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\nsecret = "x"', "secret"),
        (f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\n' * 2, "twice"),
        ("[[keys]", "TOML"),
        ("a = " + "[" * 5000, "TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_keys(text.encode())


def test_somebody_who_puts_the_key_itself_into_the_file_does_not_see_it_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(b'[[keys]]\nname = "a"\ntier = "pro"\nsha256 = "sk-kvarn-secret"')
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "å🎈", "[[keys]]", "a' #", "x" * 128])
def test_any_printable_name_survives_writing_and_reading(file: Path, name: str) -> None:
    write_keys(file, [draw_key(name, "pro")[1]])
    assert [entry.name for entry in read_keys(file)] == [name]


@pytest.mark.parametrize("name", ["a\nb", "\x7f", "", "x" * 129, "\u202e"])
def test_what_could_not_be_read_again_is_never_written(file: Path, name: str) -> None:
    write_keys(file, [draw_key("good", "pro")[1]])
    with pytest.raises(ConfigError):
        write_keys(file, [draw_key(name, "pro")[1]])
    assert [entry.name for entry in read_keys(file)] == ["good"]
    assert os.listdir(file.parent) == [file.name]


def test_the_command_line_makes_lists_and_revokes_keys(file: Path) -> None:
    key = _kvarn("new", "alice", "--tier", "pro", "--days", "2", "--keys", str(file)).stdout.strip()
    assert KeyRing(file).authenticate(bearer(key)).tier.name == "pro"
    listed = _kvarn("ls", "--keys", str(file)).stdout
    assert "alice" in listed
    assert key not in listed
    assert "already" in _kvarn("new", "alice", "--keys", str(file), code=2).stderr
    _kvarn("revoke", "alice", "--keys", str(file))
    assert refusal(KeyRing(file), bearer(key)).reason == "invalid"
    assert "no key" in _kvarn("revoke", "bob", "--keys", str(file), code=2).stderr
    assert key not in file.read_text()


def _kvarn(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvarn.cli.main", "keys", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done
