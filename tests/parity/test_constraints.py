"""Constraints on real models: random JSON schemas, every kind of vocabulary, the same bytes in any company."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

import kvarn
from kvarn import Grammar, JsonSchema, Regex, SamplingParams
from kvarn.formats.open import open_weights
from kvarn.structured.compiler import ConstraintCompiler
from kvarn.tokenizer import load_tokenizer
from tests.assets import llama_cpp_models, smollm2
from tests.conftest import Record, Size
from tests.unit.structured.constrained import accepts

pytestmark = pytest.mark.model

MAX_MASK_MS = 2.0  # mean over an answer; measured: 0.1 ms
PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[kvarn.LLM]:
    with kvarn.LLM(smollm2(), context=1024) as loaded:
        yield loaded


class SchemaMaker:
    """Random schemas whose texts are short, so that most answers come to their end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, depth: int = 3) -> dict[str, Any]:
        leaves = [self._string, self._integer, self._number, self._enum, self._const, self._pattern, self._format]
        nodes = [self._object, self._object, self._array, self._any_of, self._reference]
        return self._random.choice(leaves if depth == 0 else [*leaves, *nodes, *nodes])(depth)

    def _string(self, _: int) -> dict[str, Any]:
        low = self._random.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randrange(8)}

    def _integer(self, _: int) -> dict[str, Any]:
        low = self._random.randrange(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randrange(1, 1000)}

    def _number(self, _: int) -> dict[str, Any]:
        low = self._random.uniform(-10, 10)
        return {"type": "number", "minimum": round(low, 2), "exclusiveMaximum": round(low + 5, 2)}

    def _enum(self, _: int) -> dict[str, Any]:
        return {"enum": self._random.sample(["a", "é", "日本", 'say "hi"', "tab\t", "", 0, -1.5, True, None], 4)}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._random.choice(["x\\y", 7, False, None, "😀", [1, "a"], {"k": None}])}

    def _pattern(self, _: int) -> dict[str, Any]:
        return {
            "type": "string",
            "pattern": self._random.choice(["^[A-Z]{2}-[0-9]{3}$", "^(a|bc){1,4}d$", "^é?$", "^\\w{1,9}$"]),
        }

    def _format(self, _: int) -> dict[str, Any]:
        return {"type": "string", "format": self._random.choice(["date", "time", "ipv4", "uuid"])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["id", "name", "größe", "a b", "$x", "list"], self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        properties = {name: self.make(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randrange(2)
        high = low + self._random.randint(0, 2)
        return {"type": "array", "items": self.make(depth - 1), "minItems": low, "maxItems": high}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.make(depth - 1) for _ in range(self._random.randint(2, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        inner = self.make(0 if depth == 1 else 1)
        return {"type": "array", "items": inner, "maxItems": 2, "prefixItems": [{"type": ["null", "boolean"]}]}


def test_every_finished_answer_to_a_random_schema_validates(llm: kvarn.LLM, size: Size) -> None:
    maker = SchemaMaker(2024)
    schemas = [maker.make() for _ in range(size(10, 100))]
    handles = [
        llm.submit(
            f"JSON for {json.dumps(schema)}:\n",
            SamplingParams(constraint=JsonSchema(schema), max_tokens=160, temperature=(0.0, 1.0)[i % 2], seed=i),
        )
        for i, schema in enumerate(schemas)
    ]
    finished = 0
    for schema, handle in zip(schemas, handles, strict=True):
        completion = handle.result()
        assert completion.finish_reason in (kvarn.FinishReason.STOP, kvarn.FinishReason.LENGTH)
        if completion.finish_reason is kvarn.FinishReason.STOP:
            finished += 1
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(completion.text))
    assert finished >= 0.7 * len(schemas)  # the others were cut by max_tokens, mostly in the digits of a number


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_patterns_and_grammars_are_followed(llm: kvarn.LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=11)
    date = llm.generate("The date is ", params.replace(constraint=Regex("(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]")))
    assert re.fullmatch("(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]", date.text)
    sums = Grammar('start: term (" + " term)* " = " NUMBER\nterm: NUMBER\nNUMBER: /[0-9]{1,3}/')
    answer = llm.generate("12 + 30 = 42\n7 + 8 = 15\n", params.replace(constraint=sums))
    assert re.fullmatch(r"\d{1,3}( \+ \d{1,3})* = \d{1,3}", answer.text) or answer.finish_reason == "length"


def test_a_constrained_answer_is_the_same_alone_and_in_company(llm: kvarn.LLM) -> None:
    params = SamplingParams(constraint=JsonSchema(PEOPLE), max_tokens=80, temperature=0.9, seed=5, logprobs=0)
    alone = llm.generate("A person as JSON: ", params)
    free = SamplingParams(max_tokens=40, temperature=0.9, seed=9)
    quiet = llm.generate("Once upon a time", free)
    handles = [llm.submit("Once upon a time", free), llm.submit("A person as JSON: ", params)]
    handles += [llm.submit(f"Number {i}", params.replace(constraint=Regex("[a-z ]{40}"))) for i in range(3)]
    free_together, together = handles[0].result(), handles[1].result()
    for handle in handles[2:]:
        assert re.fullmatch("[a-z ]{40}", handle.result().text)
    assert together.text == alone.text
    assert together.logprobs == alone.logprobs
    assert free_together.token_ids == quiet.token_ids


def test_the_choices_of_one_request_each_follow_the_schema(llm: kvarn.LLM) -> None:
    params = SamplingParams(constraint=JsonSchema(PEOPLE), max_tokens=120, temperature=1.0, seed=1, n=4)
    first = llm.chat([{"role": "user", "content": "Invent a person."}], params)
    answers = [json.loads(one.text) for one in (first, *first.alternatives) if one.finish_reason == "stop"]
    assert len(answers) >= 3
    assert all(jsonschema_rs.validator_for(PEOPLE).is_valid(answer) for answer in answers)
    assert len({json.dumps(answer) for answer in answers}) > 1


def test_masks_cost_little_beside_a_step(llm: kvarn.LLM, patience: float, record: Record) -> None:
    compiled = llm.submissions.constraints.compile(JsonSchema(PEOPLE))
    ids = llm.tokenizer.encode('{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"]}', add_special=False)
    spent = []
    for _ in range(20):
        matcher = compiled.matcher()
        started_at = time.perf_counter()
        for length, token_id in enumerate(ids):
            matcher.mask_after(ids[:length], 0)
            matcher.accept_token(token_id)
        spent.append((time.perf_counter() - started_at) / len(ids))
    record("constraint-masks", {"model": "smollm2", "mask_us": round(float(np.median(spent)) * 1e6, 1)})
    assert np.median(spent) * 1000 < MAX_MASK_MS * patience


def vocabularies() -> list[Path]:
    """Byte-level and SentencePiece vocabularies first, the rest behind them."""
    first = ["ggml-vocab-llama-spm.gguf", "ggml-vocab-qwen2.gguf", "ggml-vocab-llama-bpe.gguf"]
    return sorted(llama_cpp_models().glob("ggml-vocab-*.gguf"), key=lambda path: (path.name not in first, path.name))


def test_real_vocabularies_of_every_kind_write_json(size: Size) -> None:
    texts = ['{"name": "Ada", "age": 36, "tags": []}', '{\n  "name": "é日本😀\\n",\n  "age": 0,\n  "tags": ["red"]\n}']
    wrong = ['{"name": "Ada"}', '{"name": "Ada", "age": -1, "tags": []}']
    done = 0
    for path in vocabularies()[: size(3, 100)]:
        source = open_weights(path)
        try:
            words = load_tokenizer(source)
        except kvarn.UnsupportedModel:
            continue
        compiler = ConstraintCompiler(words, words.vocab_size)
        if source.metadata["tokenizer.ggml.model"] == "bert":  # WordPiece: an encoder's, which does not write
            with pytest.raises(kvarn.ConstraintError, match="no token for the byte"):
                compiler.compile(JsonSchema(PEOPLE))
            continue
        compiled = compiler.compile(JsonSchema(PEOPLE))
        assert [text for text in texts if not accepts(compiled, words, text)] == [], path.name
        assert [text for text in wrong if accepts(compiled, words, text)] == [], path.name
        done += 1
    assert done >= 3
