"""Hostile constraints and templates against the whole server (hardening C, D): a typed refusal, and nobody notices."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvarn.structured.constraints import Constraint, Grammar, JsonSchema, Regex
from tests.chat_model import write_chat_model
from tests.server.asking import TEXT, text_body
from tests.server.beside import a_neighbour, ask, chat, story
from tests.server.edge_client import Client, Reply, check_told, post, until
from tests.server.process import SMOLLM2, ServerProcess, model_path
from tests.unit.structured.test_hostile import ENDURED, REFUSED
from tests.unit.tokenizer.test_template_worker import BOMBS, ESCAPES

pytestmark = pytest.mark.model

TEMPLATES = {
    **{f"escape-{number}.gguf": template for number, template in enumerate(ESCAPES)},
    **{f"bomb-{number}.gguf": template for number, template in enumerate(BOMBS)},
}
GROUPS = sorted({name.split()[0] for name in [*REFUSED, *ENDURED]})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SmolLM2, and one tiny model for each template."""
    folder = tmp_path_factory.mktemp("hostile")
    hostile = [_write(folder / name, template) for name, template in TEMPLATES.items()]
    models = [argument for path in (model_path(SMOLLM2), *hostile) for argument in ("--model", str(path))]
    with ServerProcess(*models, "--context", "256", module="tests.server.faulty") as server:
        yield server


def _write(path: Path, template: str) -> Path:
    return write_chat_model(path, **{"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def alone(shared: ServerProcess) -> str:
    return story(shared)


def _asked(server: ServerProcess, constraint: Constraint) -> Reply:
    fields: dict[type[Any], str] = {JsonSchema: "guided_json", Regex: "guided_regex", Grammar: "guided_grammar"}
    body = text_body(max_tokens=3, **{fields[type(constraint)]: constraint.text})
    return ask(server, post(TEXT, json.dumps(body).encode()))


@pytest.mark.parametrize("group", GROUPS)
def test_constraints_are_refused_or_endured(shared: ServerProcess, alone: str, group: str) -> None:
    with a_neighbour(shared, alone):
        for name, constraint in REFUSED.items():
            if name.split()[0] == group:
                check_told(_asked(shared, constraint), 400)
        for name, constraint in ENDURED.items():
            if name.split()[0] == group:
                reply = _asked(shared, constraint)
                assert reply.status in (200, 400), (name, reply)
                if reply.status == 400:
                    check_told(reply, 400)


def test_a_client_that_leaves_while_its_schema_is_tried_is_noticed(shared: ServerProcess, alone: str) -> None:
    schema = {"type": "integer", "multipleOf": 20_000_033}  # two seconds of processor time, then a refusal
    num_gone = shared.log.count('"status": 499')
    with a_neighbour(shared, alone):
        with Client(shared.port) as client:
            client.send(post(TEXT, json.dumps(text_body(guided_json=schema)).encode()))
            time.sleep(0.3)
        until(lambda: shared.log.count('"status": 499') == num_gone + 1)


@pytest.mark.parametrize("kind", ["escape", "bomb"])
def test_a_hostile_template_refuses_chats_and_nothing_else(shared: ServerProcess, alone: str, kind: str) -> None:
    with a_neighbour(shared, alone):
        for model in (name for name in TEMPLATES if name.startswith(kind)):
            check_told(ask(shared, chat("Hello", model=model, max_tokens=1)), 400, "template_error")
            assert ask(shared, post(TEXT, json.dumps(text_body(model=model, max_tokens=1)).encode())).status == 200
