"""What clients call a model: its file's name, or what the operator says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.errors import ConfigError
from kvarn.server.models.adapters import named_path
from kvarn.server.models.catalog import model_ids


def test_an_id_is_the_last_part_of_a_path_an_alias_or_what_is_given() -> None:
    names = ("/models/a.gguf", "smollm2", "gpt-4o=/models/b.gguf", "org/name=smollm2", "pypi:package==1.2")
    assert model_ids(names) == {
        "a.gguf": "/models/a.gguf",
        "smollm2": "smollm2",
        "gpt-4o": "/models/b.gguf",
        "org/name": "smollm2",
        "pypi:package==1.2": "pypi:package==1.2",
    }


def test_an_id_may_be_given_to_a_remote_name_with_a_version() -> None:
    assert model_ids(["mine=pypi:package==1.2:file"]) == {"mine": "pypi:package==1.2:file"}


def test_an_id_may_have_a_tag_as_ollamas_names_do() -> None:
    assert model_ids(["llama3:8b=/m/a.gguf", "x:latest=b"]) == {"llama3:8b": "/m/a.gguf", "x:latest": "b"}
    assert named_path("sql:v2=/loras/sql") == ("sql:v2", Path("/loras/sql"))


@pytest.mark.parametrize("name", ["pypi:package:dir/a=b.gguf", "hf:org/repo:a=b.gguf"])
def test_a_remote_name_has_no_id_before_it(name: str) -> None:
    assert model_ids([name]) == {name: name}


def test_a_file_that_is_called_so_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "a=b.gguf"
    file.touch()
    assert model_ids([str(file)]) == {"a=b.gguf": str(file)}


@pytest.mark.parametrize("names", [("a=x", "a=y"), ("/p/a", "a=y"), ("/p/a", "/q/a")])
def test_one_id_is_one_model(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="both called 'a'"):
        model_ids(names)


@pytest.mark.parametrize("name", ["=x", "a b=x", "x="])
def test_what_is_no_id_is_part_of_a_path(name: str) -> None:
    assert model_ids([name]) == {name: name}
