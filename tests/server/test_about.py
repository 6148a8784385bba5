"""GET /version, /docs and /tokenizer_info."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

import kvarn
from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, SMOLLM2, ServerProcess

pytestmark = pytest.mark.model
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def test_the_version_is_told(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": kvarn.__version__}


class TestDocs:
    def test_the_page_is_whole_and_its_policy_lets_nothing_else_in(self, client: httpx.Client) -> None:
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        for tag, rule in (("script", "script-src"), ("style", "style-src")):
            (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
            assert len(text) > 500
        assert rules["connect-src"] == "'self'"
        assert "unsafe" not in page.headers["content-security-policy"]

    def test_nothing_is_named_that_lies_elsewhere(self, client: httpx.Client) -> None:
        page = client.get("/docs").text
        assert not re.findall(r"https?://|//[a-z]+\.|<(?:link|img|iframe)|\son[a-z]+=|style=", page)
        assert "innerHTML" not in page
        assert "/*page" not in page

    def test_strangers_get_the_page_and_not_the_document(self, keyed: KeyedServer) -> None:
        with keyed.client(None) as nobody, keyed.client("alice") as alice:
            assert nobody.get("/docs").status_code == 200
            assert nobody.get("/openapi.json").status_code == 401
            assert nobody.get("/version").status_code == 401
            assert alice.get("/openapi.json").status_code == 200

    def test_a_real_browser_shows_every_operation_and_blocks_nothing(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        options += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
        done = subprocess.run(
            [browser, *options, f"{server.url}/docs"], capture_output=True, text=True, timeout=100, check=True
        )
        with server.client() as client:
            paths = client.get("/openapi.json").json()["paths"]
        assert done.stdout.count("<details") == sum(map(len, paths.values()))
        assert "Content Security Policy" not in done.stderr


class TestTokenizerInfo:
    def test_it_has_what_evaluations_read(self, client: httpx.Client) -> None:
        info = client.get("/tokenizer_info").json()
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert info["model_max_length"] == 2048
        assert "im_start" in info["chat_template"]
        asked = {"prompt": info["eos_token"], "add_special_tokens": False}
        (token,) = client.post("/tokenize", json=asked).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": [token]}).json()["prompt"] == info["eos_token"]

    def test_the_same_words_inside_a_text_stay_a_text(self, client: httpx.Client) -> None:
        asked = {"prompt": "a <|im_end|>", "add_special_tokens": False}
        assert len(client.post("/tokenize", json=asked).json()["tokens"]) > 3

    def test_a_model_is_chosen_by_name(self, client: httpx.Client) -> None:
        told = {model: client.get("/tokenizer_info", params={"model": model}).json() for model in (SMOLLM2, MINILM)}
        assert told[MINILM]["chat_template"] is None
        assert told[SMOLLM2]["vocab_size"] != told[MINILM]["vocab_size"]
        assert client.get("/tokenizer_info", params={"model": "no"}).status_code == 404
