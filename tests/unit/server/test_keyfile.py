"""The key file: what is drawn, written, read and refused, and the command line that edits it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvarn.errors import ConfigError
from kvarn.server.access.keyfile import (
    KEY_PREFIX,
    SkippedEntry,
    draw_key,
    editing,
    parse_keys,
    read_keys,
    valid_keys,
    write_keys,
)
from kvarn.server.access.keys import KeyRing
from tests.forked import told_by_kvarn
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
    [("keys = 3", "keys"), ("[other]\nx = 1", "other"), ("keys = [3]", "keys"), ("[[keys]", "TOML")],
)
def test_a_file_that_is_no_list_of_tables_is_refused_as_a_whole(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_keys(text.encode())
    with pytest.raises(ConfigError, match="TOML"):
        parse_keys(("a = " + "[" * 5000).encode())


WRONG = {
    "[[keys]]\nname = 3": "name",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST[1:]}"\ntier = "pro"': "64 hexadecimal",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST[:-1]}X"\ntier = "pro"': "64 hexadecimal",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"': "tier",
    f'[[keys]]\nname = ""\nsha256 = "{DIGEST}"\ntier = "pro"': "name",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\ngroup = ""': "group",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\nexpires = "soon"': "expires",
    f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\ntier = "pro"\nsecret = "x"': "secret",
    f'[[keys]]\nname = "good"\nsha256 = "{DIGEST}"\ntier = "pro"': "name of key 'good' is there twice",
    "[[keys]]\nname = 0x" + "9" * 5000: "thousands of digits",
    '[[keys]]\n"odd name" = [1, 2.5, {x = true}, "\\u007f", 2027-01-01, inf]': "odd name",
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_wrong_entry_is_skipped_by_what_is_wrong_and_survives_the_editing_of_others(
    file: Path, text: str, is_first: bool
) -> None:
    if is_first and "twice" in WRONG[text]:
        pytest.skip("of two names the first counts")
    key = add(file, "good")
    own = file.read_text()
    file.write_text(text + "\n\n" + own if is_first else own + "\n" + text)
    (skipped,) = [entry for entry in read_keys(file) if isinstance(entry, SkippedEntry)]
    assert WRONG[text] in skipped.reason
    assert KeyRing(file).authenticate(bearer(key)).key_id == "good"
    add(file, "another")
    assert [entry for entry in read_keys(file) if isinstance(entry, SkippedEntry)] == [skipped]
    assert [entry.name for entry in valid_keys(read_keys(file))] == ["good", "another"]


def test_a_key_that_is_there_twice_opens_nothing_whichever_entry_was_revoked(file: Path) -> None:
    key, bob = add(file, "alice"), add(file, "bob")
    first = file.read_text()
    file.write_text(first + first[first.index("[[keys]]") : first.rindex("[[keys]]")].replace("alice", "alias"))
    ring = KeyRing(file)
    assert refusal(ring, bearer(key)).reason == "invalid"
    assert ring.authenticate(bearer(bob)).key_id == "bob"


def test_somebody_who_puts_the_key_itself_into_the_file_does_not_see_it_in_the_reason() -> None:
    (skipped,) = parse_keys(b'[[keys]]\nname = "a"\ntier = "pro"\nsha256 = "sk-kvarn-secret"')
    assert isinstance(skipped, SkippedEntry)
    assert "secret" not in skipped.reason


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


def test_a_mistyped_tier_is_refused_and_one_of_the_configuration_is_taken(file: Path, tmp_path: Path) -> None:
    told = _kvarn("new", "alice", "--tier", "profesional", "--keys", str(file), code=2).stderr
    assert "profesional" in told
    assert "free, pro, enterprise" in told
    assert not file.exists()
    config = tmp_path / "server.toml"
    config.write_text("[tiers.gold]\nconcurrency = 2\n")
    assert "gold" in _kvarn("new", "x", "--tier", "g", "--config", str(config), "--keys", str(file), code=2).stderr
    _kvarn("new", "alice", "--tier", "gold", "--config", str(config), "--keys", str(file))


def test_the_configuration_says_where_the_keys_are(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('keys = "secret/keys.toml"\n')
    words = ("--config", str(config))
    assert "secret/keys.toml; name the file" in _kvarn("ls", *words, code=2).stderr
    key = _kvarn("new", "alice", *words).stdout.strip()
    file = tmp_path / "secret" / "keys.toml"
    assert KeyRing(file).authenticate(bearer(key)).key_id == "alice"
    assert "alice" in _kvarn("ls", *words).stdout
    _kvarn("revoke", "alice", *words)
    assert refusal(KeyRing(file), bearer(key)).reason == "invalid"
    _kvarn("rm", "alice", *words)
    assert read_keys(file) == []
    config.write_text("keys = 5\n")
    assert "keys is 5" in _kvarn("ls", *words, code=2).stderr


def test_the_command_line_removes_keys_also_those_that_cannot_be_read(file: Path) -> None:
    key = add(file, "good")
    add(file, "typo", tier="profesional")
    file.write_text(file.read_text() + '\n[[keys]]\nname = "half"\n\n[[keys]]\n')
    listed = _kvarn("ls", "--keys", str(file))
    assert "half opens nothing" in listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["good", "typo", "half", "#4"]
    assert "rm" in _kvarn("revoke", "half", "--keys", str(file), code=2).stderr
    for name in ("half", "#3", "typo"):  # once the third is gone, the fourth is the third
        _kvarn("rm", name, "--keys", str(file))
    assert [entry.name for entry in read_keys(file)] == ["good"]
    assert KeyRing(file).authenticate(bearer(key)).key_id == "good"
    assert "no key" in _kvarn("rm", "typo", "--keys", str(file), code=2).stderr


def _kvarn(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = told_by_kvarn("keys", *words)
    assert done.returncode == code, done.stderr
    return done


def test_who_could_read_the_file_can_still_read_it_after_a_change(file: Path) -> None:
    with editing(file):
        pass
    file.chmod(0o640)
    if os.getuid() == 0:
        os.chown(file, 65534, 65534)
    before = file.stat()
    with editing(file):
        pass
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
