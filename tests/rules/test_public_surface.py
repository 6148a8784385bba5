"""What `import kvarn` gives, and what it costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import kvarn

MAX_IMPORT_S = 0.3
HEAVY = ["torch", "transformers", "huggingface_hub", "tokenizers", "safetensors", "minijinja", "rich", "typer"]


def test_the_names_of_the_sdk_are_there() -> None:
    assert {"LLM", "SamplingParams", "Completion", "TokenEvent", "FinishReason", "KvarnError"} <= set(kvarn.__all__)


def test_all_is_sorted_and_has_no_duplicates() -> None:
    assert list(kvarn.__all__) == sorted(set(kvarn.__all__))


def test_every_public_name_exists_and_is_documented() -> None:
    assert not [name for name in kvarn.__all__ if name != "__version__" and not _own_docstring(getattr(kvarn, name))]


def test_every_public_method_of_the_llm_is_documented() -> None:
    methods = inspect.getmembers(kvarn.LLM, predicate=inspect.isfunction)
    assert not [name for name, method in methods if not name.startswith("_") and not inspect.getdoc(method)]


def test_importing_kvarn_is_quick() -> None:
    # The best of five: other processes can only make an import slower.
    assert min(_import_seconds() for _ in range(5)) < MAX_IMPORT_S


@pytest.mark.parametrize("package", HEAVY)
def test_importing_kvarn_leaves_heavy_packages_alone(package: str) -> None:
    assert package not in _modules_after_import()


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        getattr(kvarn, "no_such_" + "name")


def _own_docstring(thing: object) -> str | None:
    """The docstring someone wrote: neither inherited nor the signature that dataclass fills in."""
    text = getattr(thing, "__doc__", None)
    name = getattr(thing, "__name__", "")
    return None if text is None or text.startswith(f"{name}(") else text


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def _import_seconds() -> float:
    return float(_run("import time; t = time.perf_counter(); import kvarn; print(time.perf_counter() - t)"))


def _modules_after_import() -> set[str]:
    return set(json.loads(_run("import json, sys, kvarn; print(json.dumps(sorted(sys.modules)))")))
