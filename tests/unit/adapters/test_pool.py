"""Adapters by name: replaced, unloaded and put out of memory, while requests hold theirs."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.adapters.pool import AdapterPool
from kvarn.adapters.weights import prefix_salt
from kvarn.backends.fake import FakeBackend
from kvarn.errors import CapacityError, DoesNotFit, FormatError, InvalidParameter, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import Encoder, ModelSpec
from tests.lora_files import random_pairs, write_peft
from tests.tiny_models import CONFIGS, random_tensors, tiny_model

TENSORS = random_tensors("llama", CONFIGS["llama"])


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return describe(open_weights(tiny_model("llama", tmp_path_factory.mktemp("base")))).spec


def adapter(folder: Path, name: str, seed: int) -> Path:
    return write_peft(folder / name, random_pairs(TENSORS, seed=seed))


def test_an_adapter_has_the_name_of_its_folder_or_a_given_one(spec: ModelSpec, tmp_path: Path) -> None:
    pool = AdapterPool(spec, FakeBackend(), 1 << 30)
    first = pool.load(adapter(tmp_path, "sql", 0))
    assert (first.name, first.ranks, first.base) == ("sql", (4,), "tests/tiny")
    assert {"q_proj", "down_proj"} <= set(first.targets)
    assert pool.load(tmp_path / "sql", "other").digest == first.digest
    assert [lora.name for lora in pool.loras] == ["sql", "other"]
    pool.unload("sql")
    with pytest.raises(InvalidParameter, match="other"):
        pool.uses("sql")
    with pytest.raises(InvalidParameter, match="no adapter"):
        pool.unload("sql")


@pytest.mark.parametrize("name", ["", "..", "-x", "a b", "a\0b", "x" * 129, 7])
def test_names_are_plain(name: object, spec: ModelSpec, tmp_path: Path) -> None:
    pool = AdapterPool(spec, FakeBackend(), 1 << 30)
    with pytest.raises(InvalidParameter, match="name"):
        pool.load(adapter(tmp_path, "sql", 0), name)  # type: ignore[arg-type]


def test_what_a_request_uses_depends_on_bytes_and_factor_only(spec: ModelSpec, tmp_path: Path) -> None:
    pool = AdapterPool(spec, FakeBackend(), 1 << 30)
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        pool.load(adapter(tmp_path, name, seed))
    salts = [
        prefix_salt("me", pool.uses(one)) for one in ("a", "b", "c", {"a": 0.5}, {"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    assert salts[0] == salts[2]
    assert salts[4] == salts[5]
    assert len(set(salts)) == 4
    assert prefix_salt("me", pool.uses({"a": 0})) == prefix_salt("me", ()) == "me"


@pytest.mark.parametrize("lora", [5, {"a": "x"}, {"a": float("nan")}, {"a": True}, {1: 1.0}, ["a"], {"a": 1e9}])
def test_a_choice_that_makes_no_sense_is_refused(lora: object, spec: ModelSpec, tmp_path: Path) -> None:
    pool = AdapterPool(spec, FakeBackend(), 1 << 30)
    pool.load(adapter(tmp_path, "a", 0))
    with pytest.raises(InvalidParameter):
        pool.uses(lora)  # type: ignore[arg-type]


def test_the_least_recently_used_one_is_put_out_and_read_again(spec: ModelSpec, tmp_path: Path) -> None:
    size = AdapterPool(spec, FakeBackend(), 1 << 30).load(adapter(tmp_path, "a", 0)).num_bytes
    pool = AdapterPool(spec, FakeBackend(), 2 * size)
    handles = {}
    for seed, name in enumerate("ab"):
        pool.load(adapter(tmp_path, name, seed))
        handles[name] = pool.uses(name)[0].handle
    pool.uses("a")
    pool.load(adapter(tmp_path, "c", 2))
    assert pool.num_bytes == 2 * size
    assert pool.uses("a")[0].handle is handles["a"]
    assert pool.uses("b")[0].handle is not handles["b"]
    assert pool.num_bytes == 2 * size
    assert len(pool.loras) == 3


def test_what_requests_use_is_never_put_out(spec: ModelSpec, tmp_path: Path) -> None:
    size = AdapterPool(spec, FakeBackend(), 1 << 30).load(adapter(tmp_path, "a", 0)).num_bytes
    pool = AdapterPool(spec, FakeBackend(), 2 * size)
    for seed, name in enumerate("ab"):
        pool.load(adapter(tmp_path, name, seed))
    held = [pool.uses(name) for name in "ab"]
    with pytest.raises(CapacityError, match="lora_bytes"):
        pool.load(adapter(tmp_path, "c", 2))
    pool.unload("a")
    with pytest.raises(CapacityError):  # its requests still run
        pool.load(tmp_path / "c")
    held.clear()
    gc.collect()
    pool.load(tmp_path / "c")
    assert pool.num_bytes == 2 * size


def test_one_that_changed_on_disk_is_not_read_again_in_silence(spec: ModelSpec, tmp_path: Path) -> None:
    size = AdapterPool(spec, FakeBackend(), 1 << 30).load(adapter(tmp_path, "a", 0)).num_bytes
    pool = AdapterPool(spec, FakeBackend(), size)
    for seed, name in enumerate("ab"):
        pool.load(adapter(tmp_path, name, seed))
    adapter(tmp_path, "a", 5)
    with pytest.raises(FormatError, match="changed"):
        pool.uses("a")


def test_an_adapter_larger_than_the_budget_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="lora_bytes"):
        AdapterPool(spec, FakeBackend(), 1000).load(adapter(tmp_path, "a", 0))


def test_a_backend_without_adapters_says_so(spec: ModelSpec, tmp_path: Path) -> None:
    class Plain:
        name = "plain"

    with pytest.raises(UnsupportedModel, match="the plain backend has no adapters"):
        AdapterPool(spec, Plain(), 1 << 30).load(adapter(tmp_path, "a", 0))


def test_models_that_only_give_vectors_have_no_adapters(spec: ModelSpec, tmp_path: Path) -> None:
    """Nothing of theirs takes one: vectors of the base would come under an adapter's name."""
    pool = AdapterPool(replace(spec, generation=Encoder(pooling="last")), FakeBackend(), 1 << 30)
    with pytest.raises(UnsupportedModel, match="is an encoder"):
        pool.load(adapter(tmp_path, "sql", 0))
    assert pool.loras == ()
