"""The files of the page: exactly those that are listed, those of others unchanged, and small."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from kvarn.diffusion import CACHES, CANVASES, POLICIES
from kvarn.retrieval.ingest import files
from kvarn.server.api.diffusion_schema import DiffusionBody, SparseBody
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.page import assets

STATIC = Path(assets.__file__).parent / "static"
VENDOR = STATIC / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))["files"]
# Fetched when the first formula or code block is shown.
ON_DEMAND = ("vendor/temml.js", "vendor/highlight")
# Fields of a chat that the page asks for elsewhere, or has no use for.
ELSEWHERE = {"model", "messages", "stream", "stream_options", "tools", "response_format", "logprobs", "top_logprobs"}
ELSEWHERE |= {"retrieval", "diffusion"}
UNUSED = {
    "n": "one answer at a time; regenerate makes more",
    "repeat_penalty": "another name of repetition_penalty",
    "max_completion_tokens": "another name of max_tokens",
    "prompt_logprobs": "computes the prompt anew",
    "guided_json": "response_format asks for the same",
    "guided_regex": "for programs",
    "guided_grammar": "for programs",
    "tool_choice": "the model chooses",
    "parallel_tool_calls": "the default is right",
    "modalities": "there is only text",
    "store": "nothing is stored",
    "prediction": "for programs that edit texts",
    "lora": "adapters are models of the list",
    "speculate": "changes no byte of an answer",
}


def test_the_list_names_the_files_of_the_folder() -> None:
    there = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert there == {*assets.NAMES, "index.html", "vendor/manifest.json", "vendor/LICENSES.txt"}


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_a_file_of_another_project_is_the_published_one(entry: dict[str, object]) -> None:
    """Bare import names became paths, because no import map is allowed by the policy; nothing else is changed."""
    text = (VENDOR / str(entry["file"])).read_text(encoding="utf-8")
    assert hashlib.sha256(text.encode()).hexdigest() == entry["sha256"]
    published = text.removesuffix(str(entry["appended"]))
    for before, after in entry["replaced"]:  # type: ignore[attr-defined]
        published = published.replace(after, before)
    assert hashlib.sha256(published.encode()).hexdigest() == entry["upstream_sha256"]


def test_every_file_of_another_project_is_in_the_manifest_with_its_licence() -> None:
    assert {path.name for path in VENDOR.glob("*.js")} == {entry["file"] for entry in MANIFEST}
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(f"{entry['package']} {entry['version']} ({entry['licence']})" in licences for entry in MANIFEST)


def test_the_first_load_is_small() -> None:
    first = [STATIC / "index.html", *(STATIC / name for name in assets.NAMES if not name.startswith(ON_DEMAND))]
    contents = [path.read_bytes() for path in first]
    assert sum(map(len, contents)) <= 600_000
    assert sum(len(gzip.compress(content)) for content in contents) <= 150_000


def test_no_file_of_ours_writes_markup_past_the_sanitizer_or_names_another_host() -> None:
    ours = [path for path in STATIC.iterdir() if path.suffix in (".js", ".html", ".css")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in ours}
    forbidden = re.compile(
        r"innerHTML\s*=(?!\$)|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3\.org)"
    )
    assert not {name: found.group() for name, text in texts.items() if (found := forbidden.search(text))}


def names_on_the_page() -> set[str]:
    return set(re.findall(r'\["([\w.]+)", "', (STATIC / "fields.js").read_text(encoding="utf-8")))


def test_every_sampling_field_of_a_chat_is_on_the_page() -> None:
    shown = {name for name in names_on_the_page() if "." not in name}
    assert shown | ELSEWHERE | set(UNUSED) == set(ChatBody.model_fields)


def test_every_field_of_denoising_is_on_the_page() -> None:
    shown = {name.removeprefix("diffusion.") for name in names_on_the_page() if name.startswith("diffusion.")}
    sparse = {f"sparse.{name}" for name in SparseBody.model_fields}
    assert shown == (set(DiffusionBody.model_fields) - {"sparse", "events"}) | sparse
    text = (STATIC / "fields.js").read_text(encoding="utf-8").replace('" +\n  "', "")
    assert f'"{"|".join(POLICIES)}"' in text
    assert f'"{"|".join(CACHES)}"' in text
    assert f'"choice:{"|".join(CANVASES)}"' in text


def test_the_page_knows_the_files_that_the_server_reads() -> None:
    text = (STATIC / "filekinds.js").read_text(encoding="utf-8").replace('" +\n    "', "")
    for kind, suffixes in files.KINDS.items():
        assert re.search(rf'^  {kind}:\s+"{re.escape(suffixes)}",$', text, re.MULTILINE), kind
    for kind in ("code", "text"):
        named = " ".join(name for name, of in files.NAMES.items() if of == kind)
        assert f'  {kind}: "{named}",' in text
    (folders,) = re.findall(r'SKIPPED_FOLDERS = new Set\("([^"]+)"', text)
    assert set(folders.split()) == files.SKIPPED_FOLDERS
    (generated,) = re.findall(r"GENERATED = (\[.+\]);", text)
    assert tuple(json.loads(generated)) == files.GENERATED
