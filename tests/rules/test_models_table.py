"""The table of models is what the registry has, and says nothing about tests that are not there."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

from kvarn.cli.models.manage import list_models
from kvarn.models.config.families import FAMILIES
from kvarn.models.diffusion.architectures import MASKED, TRANSCRIPTION
from kvarn.models.encoders.architectures import ENCODERS
from kvarn.models.registry import ARCHITECTURES
from tests import canvas_models, diffusion_models, tiny_models
from tests.rules.tree import ROOT


def make_models_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models_table", ROOT / "docs" / "make_models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current() -> None:
    script = make_models_table()
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run python docs/make_models_table.py"


def test_every_family_is_tested_against_what_the_table_says() -> None:
    tiny_families = pytest.importorskip("tests.tiny_families")
    compared = {config["model_type"] for config in tiny_models.CONFIGS.values()} | set(tiny_families.FAMILIES)
    compared |= {f"{family}_text" for family in tiny_families.VISION}
    compared |= set(pytest.importorskip("tests.tiny_encoders").FAMILIES)
    compared |= {canvas_models.MODEL_TYPE}
    transcribed = pytest.importorskip("tests.authors_encoders").MODELS
    assert {one.gguf for one in ENCODERS if "transcription" in one.oracle} == {
        ("jina-bert-v2", "jina-bert-v3"),
        ("nomic-bert", "nomic-bert-moe"),
    }
    assert set(transcribed) == {"jina_bert", "nomic_moe"}
    for one in ARCHITECTURES:
        if one.oracle == TRANSCRIPTION:
            assert set(one.hf) & diffusion_models.ARCHITECTURES.keys(), one.title
        elif one.oracle == MASKED:
            assert set(one.hf) & diffusion_models.LIKE.keys(), one.title
        else:
            # gemma3 is gemma3_text, nested; kimi_k2 deepseek_v3 by another name
            assert set(one.hf) - {"gemma3", "kimi_k2"} <= compared, one.title


def test_the_documented_family_is_in_the_tree_and_took_less_than_60_lines() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    lines = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    added, text = 0, ""
    for line in lines:
        if line.startswith("+++ "):
            text = (ROOT / line.removeprefix("+++ ")).read_text(encoding="utf-8")
        else:
            added += 1
            assert line.removeprefix("+") in text, line
    assert 20 < added < 60


def test_every_model_type_has_its_keys_and_every_name_one_family() -> None:
    hf = [name for one in ARCHITECTURES for name in one.hf]
    gguf = [name for one in ARCHITECTURES for name in one.gguf]
    assert sorted(hf) == sorted(FAMILIES)
    assert len(set(gguf)) == len(gguf)


def test_the_command_prints_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    list_models(as_json=True, supported=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in rows} == {one.title for one in ARCHITECTURES}
    list_models(as_json=False, supported=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ARCHITECTURES) + 1
    assert any("gpt-oss" in line and "131,072" in line and "transformers" in line for line in lines)
