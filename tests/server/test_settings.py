"""Settings: defaults < file < environment < flags, each value checked, each source told."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvarn.config import prefix_folder
from kvarn.errors import ConfigError
from kvarn.server.access.keyfile import draw_key, write_keys
from kvarn.server.process.setting_sources import explain, load_config, variable
from kvarn.server.process.settings import ServerConfig, make_config
from tests.chat_model import write_chat_model
from tests.forked import told_by_kvarn
from tests.server.process import ServerProcess


def _file(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _served(config: ServerConfig) -> ServerConfig:
    """With what `kvarn serve` has by default beyond a server that a program makes: prefixes on disk."""
    return replace(config, engine=replace(config.engine, prefix_cache_dir=str(prefix_folder())))


def _kvarn(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KVARN_SERVER_")}
    return told_by_kvarn(*args, env={**clean, **(env or {})})


def test_without_sources_the_defaults_hold() -> None:
    assert load_config(environment={}) == _served(ServerConfig())


def test_a_stronger_source_wins_value_by_value(tmp_path: Path) -> None:
    path = _file(tmp_path, "port = 1000\nmax_n = 2\nqueue_limit = 9\n[engine]\nthreads = 1\ncontext = 64\n")
    config = load_config(path, {"port": 3000, "engine.context": 128}, {"port": "2000", "max_n": "3"})
    assert (config.port, config.max_n, config.queue_limit) == (3000, 3, 9)
    assert (config.engine.threads, config.engine.context, config.engine.queue_limit) == (1, 128, 9)


def test_explain_names_the_source_of_every_value(tmp_path: Path) -> None:
    path = _file(tmp_path, "port = 1000\nping_s = 2\n[engine]\nthreads = 1\n[tiers.free]\nconcurrency = 2\n")
    told = {one.name: one for one in explain(path, {"port": 3000}, {"max_n": "3"})}
    assert (told["port"].value, told["port"].source) == (3000, "flag")
    assert (told["max_n"].value, told["max_n"].source) == (3, "environment KVARN_SERVER_MAX_N")
    assert told["ping_s"].source == told["engine.threads"].source == f"file {path}"
    assert told["tiers.free.concurrency"].source == f"file {path}"
    assert told["host"].source == told["engine.context"].source == told["tiers.pro.concurrency"].source == "default"


def test_relative_paths_begin_at_the_files_folder_and_elsewhere_at_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "smollm2").touch()  # an alias stays one
    (tmp_path / "folder").mkdir()
    listed = [
        *("smollm2", "m/a.gguf", "b=b.gguf", "folder", "hf:o/r", "c=pypi:p==1", "/x/d.gguf", "~/e.gguf", "unknown")
    ]
    names = ("keys", "uds", "tls_cert", "tls_key", "response_store", "batch_dir")
    lines = [f'{name} = "s/{name}"' for name in names]
    path = _file(tmp_path, "\n".join([f"models = {listed}", 'pinned = ["m/a.gguf", "b"]', *lines]))
    config = load_config(path, environment={})
    assert [getattr(config, name) for name in names] == [tmp_path / "s" / name for name in names]
    placed = (f"{tmp_path}/m/a.gguf", f"b={tmp_path}/b.gguf", f"{tmp_path}/folder")
    assert config.models == ("smollm2", *placed, *listed[4:])
    assert config.pinned == (f"{tmp_path}/m/a.gguf", "b")
    stronger = load_config(path, {"models": ("x.gguf",), "uds": Path("u")}, {"keys": "k.toml"})
    assert (stronger.models, stronger.uds, stronger.keys) == (("x.gguf",), Path("u"), Path("k.toml"))


def test_a_server_finds_what_its_file_names_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_chat_model(tmp_path / "models" / "tiny.gguf")
    key, entry = draw_key("alice", "free")
    write_keys(tmp_path / "keys.toml", [entry])
    path = _file(tmp_path, 'models = ["models/tiny.gguf"]\nkeys = "keys.toml"\n')
    with ServerProcess("--config", path) as server, server.client() as http:
        assert http.get("/v1/models").status_code == 401
        listed = http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()
        assert [one["id"] for one in listed["data"]] == ["tiny.gguf"]


def test_explain_leaves_no_setting_out() -> None:
    told = {one.name.partition(".")[0] for one in explain(environment={})}
    assert told == {one.name for one in fields(ServerConfig)}


def test_the_environment_is_read_by_the_type_of_each_setting() -> None:
    environment = {
        "models": "smollm2, minilm",
        "keys": "keys.toml",
        "insecure": "yes",
        "ping_s": "2.5",
        "memory_bytes": "2000000000",
        "engine_prefix_cache": "off",
        "engine_isa": "scalar",
        "engine_requests_per_s": "3",
    }
    config = load_config(environment=environment)
    assert config.models == ("smollm2", "minilm")
    assert config.keys == Path("keys.toml")
    assert config.insecure is True
    assert (config.ping_s, config.memory_bytes) == (2.5, 2_000_000_000)
    engine = config.engine
    assert (engine.prefix_cache, engine.isa, engine.requests_per_s) == (False, "scalar", 3.0)


def test_variables_that_kubernetes_adds_for_a_service_are_not_settings() -> None:
    links = {"port": "tcp://10.0.0.1:80", "service_host": "10.0.0.1", "port_80_tcp_addr": "10.0.0.1"}
    assert load_config(environment=links) == _served(ServerConfig())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"port": "80"}, "port is '80'"),
        ({"port": True}, "port is True"),
        ({"max_n": 0}, "from 1 to 128"),
        ({"ping_s": float("nan")}, "ping_s is nan"),
        ({"drain_delay_s": -1}, "drain_delay_s is -1"),
        ({"heartbeat_timeout_s": 0}, "heartbeat_timeout_s is 0"),
        ({"unknown_fields": "drop"}, "'refuse', 'ignore'"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"models": []}, "models is empty"),
        ({"models": "smollm2"}, "give a list of texts"),
        ({"models": ["a", "a"]}, "'a' twice"),
        ({"cors_origins": ["*"]}, "scheme and host"),
        ({"memory_bytes": 5}, "memory_bytes is 5"),
        ({"colour": 1}, "no setting 'colour'; `kvarn config explain`"),
        ({"modles": ["a"]}, "no setting 'modles'; is models meant? "),
        ({"engine": {"thread": 4}}, "no setting 'engine.thread'; is threads meant? "),
        ({"engine": {"speed": 1}}, "no setting 'engine.speed'"),
        ({"engine": {"threads": 0}}, "threads is 0"),
        ({"engine": {"queue_limit": 5}}, "set that one"),
        ({"tiers": {"free": {"colour": 1}}}, "tiers.free"),
        ({"tiers": {"free": 3}}, "tiers.free is 3"),
        ({"host": "no spaces"}, "host is"),
        ({"keys": 5}, "keys is 5"),
        ({"keys": "a\0b"}, "keys is"),
        ({"keys": "~nosuchuser/k.toml"}, "no such user"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert words in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_listening_beyond_loopback_needs_keys_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--keys .* or --insecure"):
        make_config({"host": host})
    assert make_config({"host": host, "insecure": True}).host == host
    assert make_config({"host": host, "keys": "keys.toml"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert make_config({"host": host}).is_loopback


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", "is not TOML"),
        ("engine = 3", "as a table"),
        ("tiers = [1]", "as a table"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("port = " + "9" * 5000, "thousands of digits"),
        ("port = 0x" + "9" * 5000, "port is a number of more than 64 bits"),
        ("[tiers.free]\nconcurrency = 0x" + "9" * 5000, r"tiers\.free\.concurrency is a number"),
        ("# " + "a" * (1 << 20), "more than 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(_file(tmp_path, text), environment={})


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no endless file here")
def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        load_config(Path("/dev/zero"), environment={})


@pytest.mark.parametrize(
    "arguments", [("--model", "~nosuchuser/x.gguf"), ("--keys", "~nosuchuser/k.toml"), ("--config", "none\n.toml")]
)
def test_wrong_paths_are_told_in_one_sentence(arguments: tuple[str, ...]) -> None:
    done = _kvarn("serve", "--port", "0", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvarn: ")
    assert "internal error" not in line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml cannot be read: No such file"):
        load_config(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("colour", "1", "no setting for KVARN_SERVER_COLOUR"),
        ("prot", "1", r"no setting for KVARN_SERVER_PROT; is KVARN_SERVER_PORT meant\? "),
        ("port", "eighty", "port is 'eighty'"),
        ("insecure", "perhaps", "insecure is 'perhaps'"),
        ("engine_speed", "1", "no setting for KVARN_SERVER_ENGINE_SPEED"),
    ],
)
def test_a_wrong_variable_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(environment={name: text})


def test_the_command_line_explains_what_it_would_use(tmp_path: Path) -> None:
    path = _file(tmp_path, 'models = ["smollm2", "minilm"]\n')
    done = _kvarn("config", "explain", "--config", str(path), env={variable("engine.threads"): "2"})
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert re.split(" {2,}", rows["models"])[1:] == ['["smollm2", "minilm"]', f"file {path}"]
    assert rows["engine.threads"].split() == ["engine.threads", "2", "environment", "KVARN_SERVER_ENGINE_THREADS"]
    assert rows["port"].split() == ["port", "8000", "default"]


def test_serve_explains_its_flags_and_starts_nothing() -> None:
    done = _kvarn("serve", "--port", "9000", "--context", "512", "--explain", "--model", "a-model-nobody-has")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["port"] == ["9000", "flag"]
    assert rows["engine.context"] == ["512", "flag"]
    assert rows["models"] == ['["a-model-nobody-has"]', "flag"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "nosuchhost.invalid", "--insecure"), "choose a --host that this machine has"),
        (("--host", "192.0.2.1", "--insecure"), "choose a --host that this machine has"),
    ],
)
def test_an_address_that_is_not_ours_is_told_as_such(arguments: tuple[str, ...], words: str) -> None:
    done = _kvarn("serve", "--model", "a-model-nobody-has", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_port_in_use_is_told_as_such() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = _kvarn("serve", "--model", "a-model-nobody-has", "--port", str(other.getsockname()[1]))
    assert done.returncode == 2
    assert "in use; choose another --port" in done.stderr


def test_serve_refuses_to_be_open_to_the_world_before_it_loads_anything() -> None:
    done = _kvarn("serve", "--host", "0.0.0.0", "--model", "a-model-nobody-has")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "host is 0.0.0.0" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr
