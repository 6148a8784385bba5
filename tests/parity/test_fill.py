"""Templates filled by the diffusion model of the package: always valid, and the same in any company."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

import kvarn
from kvarn import LLM, AsyncLLM, DiffusionParams, EngineConfig, SamplingParams, Slot, SparseConfig
from kvarn.diffusion import POLICIES, Policy
from kvarn.engine.engine import Engine
from kvarn.engine.submission import Submission
from kvarn.fill import template_parts
from kvarn.types import Completion
from tests.conftest import Record, Size
from tests.results import write_result

STORY = "{{name}} had a {{pet}} and was {{age}} years old. On {{day}} they {{did}}. The end."
SLOTS = {
    "name": Slot(regex="[A-Z][a-z]+"),
    "pet": Slot(choices=("dog", "cat", "big red bird")),
    "age": Slot(regex="[1-9][0-9]?", max_tokens=3),
    "day": Slot(regex=r"20[0-9]{2}-[01][0-9]-[0-3][0-9]"),
    "did": Slot(max_tokens=6),
}
WAYS = {
    "none": DiffusionParams(cache="none"),
    "prefix": DiffusionParams(cache="prefix", block_length=16),
    "dual": DiffusionParams(policy="threshold"),
    "sub_block": DiffusionParams(cache="sub_block"),
    "sparse": DiffusionParams(sparse=SparseConfig(retention_ratio=0.5)),
    "editing": DiffusionParams(policy="joint_threshold"),
    "random": DiffusionParams(policy="random"),
    "timesteps": DiffusionParams(policy="entropy", steps=40),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-diffusion", threads=1) as llm:
        yield llm


def check_story(values: dict[str, str]) -> None:
    for name in ("name", "age", "day"):
        assert re.fullmatch(SLOTS[name].regex or "", values[name]), values
    assert values["pet"] in SLOTS["pet"].choices


@pytest.mark.parametrize("way", WAYS)
def test_slots_follow_their_rules_and_literals_stay(llm: LLM, way: str) -> None:
    filled = llm.fill(STORY, SLOTS, params=SamplingParams(diffusion=WAYS[way]))
    check_story(dict(filled.values))
    assert filled.text == re.sub(r"\{\{(\w+)\}\}", lambda slot: filled.values[slot[1]], STORY)
    assert "  " not in filled.text


@pytest.mark.parametrize("way", WAYS)
def test_a_template_alone_is_the_same_among_others(llm: LLM, way: str) -> None:
    params = SamplingParams(temperature=1.5, seed=3, diffusion=WAYS[way])
    alone = llm.fill(STORY, SLOTS, params=params)
    check_story(dict(alone.values))
    submission, layout = llm.submissions.of_fill(
        llm.tokenizer.encode(""), template_parts(STORY, SLOTS), params, llm.context
    )
    others = [llm.submissions.of_prompt(text, SamplingParams(max_tokens=12, seed=1)) for text in ("Tom", "One day a")]
    beside = llm.client.complete([others[0], submission, others[1], submission])
    assert {layout.filled(llm.tokenizer, beside[index]).text for index in (1, 3)} == {alone.text}


def test_a_preempted_template_is_filled_the_same() -> None:
    params = SamplingParams(temperature=1.0, seed=5, diffusion=DiffusionParams(block_length=16))
    with LLM("tiny-diffusion", threads=1) as llm:
        alone = llm.fill(STORY, SLOTS, params=params)
    with LLM("tiny-diffusion", config=EngineConfig(threads=1, kv_bytes=3 << 19, max_running=6)) as llm:
        ids, parts = llm.tokenizer.encode(""), template_parts(STORY, SLOTS)
        submission, layout = llm.submissions.of_fill(ids, parts, params, llm.context)
        others = [llm.submissions.of_prompt("One day", SamplingParams(max_tokens=48, priority=1)) for _ in range(2)]
        filled = llm.client.complete([submission, others[0], submission, others[1], submission])
        assert llm.stats().preemptions > 0
        assert {layout.filled(llm.tokenizer, filled[index]).text for index in (0, 2, 4)} == {alone.text}


FORM = "Tom had a {{pet}} and was {{age}}. They {{did}} all day."
FORM_SLOTS = {"pet": SLOTS["pet"], "age": SLOTS["age"], "did": Slot(max_tokens=6)}
CACHES = ("none", "prefix", "dual", "sub_block", "sparse")  # those of a model that sees both ways


def preempted(llm: LLM, submission: Submission) -> Completion:
    """Complete a request that loses its blocks up to three times on the way, and at least once."""
    taken_at: list[int] = []

    def take_blocks(engine: Engine) -> None:
        steps = engine.stats().steps
        running = [one for one in engine.scheduler.requests() if one.state == "running"]
        if running and len(taken_at) < 3 and steps >= (taken_at[-1] + 4 if taken_at else 0):
            engine.scheduler.preempt(running[0])
            taken_at.append(steps)

    handle = llm.client.submit(submission)
    with ThreadPoolExecutor(1) as waiting:
        completed = waiting.submit(handle.result)
        while not completed.done():
            llm.client.call(take_blocks).result()
            time.sleep(0.002)
    assert taken_at
    return completed.result()


@pytest.fixture(scope="module")
def same_bytes(is_long: bool) -> Iterator[dict[str, list[str]]]:
    """Which policies have filled the same bytes with which caches; kept under --long, if every policy was asked."""
    found: dict[str, list[str]] = {policy: [] for policy in POLICIES}
    begun = time.process_time()
    yield found
    if is_long and all(found.values()):
        figures = {"same": sum(map(len, found.values())), "of": len(POLICIES) * len(CACHES), "caches": found}
        write_result("fill-combinations", figures | {"cpu_s": round(time.process_time() - begun, 2)})


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_with_every_cache_fills_the_same_bytes(
    llm: LLM, policy: Policy, is_long: bool, same_bytes: dict[str, list[str]]
) -> None:
    """Alone, among others and preempted; in the short form each policy with one of the caches."""
    place = POLICIES.index(policy) % len(CACHES)
    for cache in CACHES if is_long else CACHES[place : place + 1]:
        params = SamplingParams(temperature=1.2, seed=7, diffusion=DiffusionParams(policy=policy, cache=cache))
        ids, parts = llm.tokenizer.encode("Once upon a time. "), template_parts(FORM, FORM_SLOTS)
        submission, layout = llm.submissions.of_fill(ids, parts, params, llm.context)
        if (policy, cache) == ("joint_threshold", "sub_block"):  # it edits whole blocks
            with pytest.raises(kvarn.InvalidParameter, match="joint_threshold"):
                llm.client.complete([submission])
            continue
        alone = layout.filled(llm.tokenizer, llm.client.complete([submission])[0])
        assert alone.values["pet"] in SLOTS["pet"].choices
        assert re.fullmatch(SLOTS["age"].regex or "", alone.values["age"])
        others = [llm.submissions.of_prompt(text, SamplingParams(max_tokens=9, seed=2)) for text in ("Tom", "One day")]
        beside = llm.client.complete([others[0], submission, others[1], submission])
        for completion in (beside[1], beside[3], preempted(llm, submission)):
            assert completion.token_ids == alone.completion.token_ids, cache
            assert layout.filled(llm.tokenizer, completion).text.encode() == alone.text.encode(), cache
        same_bytes[policy].append(cache)


def test_every_json_schema_is_followed(llm: LLM, size: Size, record: Record) -> None:
    num_schemas, num_tokens, begun = size(12, 200), 0, time.process_time()
    for seed in range(num_schemas):
        made = random.Random(seed)
        schema = random_object(made, depth=2)
        warm = SamplingParams(temperature=made.choice([0.0, 0.7, 3.0]), seed=seed)
        filled = llm.fill(schema, prompt="Once upon a time. ", params=warm)
        num_tokens += len(filled.completion.token_ids)
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(filled.text, parse_float=number)), filled.text
    cpu_s = round(time.process_time() - begun, 2)
    record("fill-schemas", {"schemas": num_schemas, "valid": num_schemas, "canvas_tokens": num_tokens, "cpu_s": cpu_s})


def test_an_engine_in_a_process_of_its_own_fills_the_same(llm: LLM) -> None:
    with LLM("tiny-diffusion", config=EngineConfig(threads=1, own_process=True)) as other:
        assert other.fill(STORY, SLOTS).text == llm.fill(STORY, SLOTS).text


def test_a_middle_fits_between_two_texts(llm: LLM) -> None:
    before, after = "One day, a little ", " and they played in the park."
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=6)
    middle = llm.infill(before, after, params)
    assert middle.text
    assert "  " not in before + middle.text + after
    assert len(middle.token_ids) <= 8
    filled = llm.fill(
        "{{middle}}" + after, {"middle": Slot(8)}, prompt=before.rstrip(), params=params.replace(max_tokens=None)
    )
    assert filled.values["middle"] == middle.text.strip()

    async def asked() -> str:
        async with AsyncLLM("tiny-diffusion", threads=1) as other:
            return (await other.infill(before, after, params)).text

    assert asyncio.run(asked()) == middle.text


def test_what_a_slot_cannot_hold_is_refused(llm: LLM) -> None:
    with pytest.raises(kvarn.InvalidParameter, match="no text of 2 tokens"):
        llm.fill("{{a}}", {"a": Slot(regex="[0-9]{9}", max_tokens=2)})
    with pytest.raises(kvarn.InvalidParameter, match="which the context leaves"):
        llm.fill("{{a}}", {"a": Slot(max_tokens=4000)})
    with pytest.raises(kvarn.ConstraintError):
        llm.fill("{{a}}", {"a": Slot(regex="(")})
    with pytest.raises(kvarn.InvalidParameter, match="max_tokens"):
        llm.fill("{{a}}", params=SamplingParams(max_tokens=4))


def number(text: str) -> float:
    """As JSON has it; Python would make infinity of 1e999, which no schema calls a number."""
    return min(max(float(text), -1e300), 1e300)


def random_object(made: random.Random, depth: int) -> dict[str, Any]:
    properties = {
        f"{made.choice('abcdé')}{index}": random_value(made, depth - 1) for index in range(made.randint(1, 3))
    }
    required = made.sample(sorted(properties), made.randint(0, len(properties)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_value(made: random.Random, depth: int) -> dict[str, Any]:
    low = made.randint(-20, 100)
    scalars: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "minLength": made.randint(1, 12), "maxLength": 20},
        {"type": "string", "pattern": made.choice([r"^[a-c]{2,5}$", r"^(ab)+$", r"^\d{3}-\d{2}$"])},
        {"type": "string", "format": made.choice(["date", "uuid", "date-time", "ipv4"])},
        {"type": "integer", "minimum": low, "maximum": low + made.randint(0, 300)},
        {"type": "integer", "exclusiveMinimum": 1000},
        {"type": "number", "minimum": 0.5, "maximum": 0.75},
        {"type": "number"},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"enum": ["red", 7, None, {"a": [1, 2]}, "a much longer choice than the others"]},
        {"anyOf": [{"type": "integer"}, {"const": "none"}]},
    ]
    if depth > 0 and made.random() < 0.4:
        nested: list[dict[str, Any]] = [
            random_object(made, depth),
            {"type": "array", "items": random_value(made, depth - 1), "minItems": made.randint(0, 2), "maxItems": 3},
        ]
        return made.choice(nested)
    return made.choice(scalars)
