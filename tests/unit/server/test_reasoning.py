"""Levels of effort become what the chat template reads, if it reads any."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.server.chat.reasoning import Effort, effort_kwargs

LEVEL, SWITCH = "{{ reasoning_effort | default('medium') }}", "{% if enable_thinking is false %}"


@pytest.mark.parametrize(
    ("effort", "template", "wanted"),
    [
        ("high", LEVEL, {"reasoning_effort": "high"}),
        ("minimal", LEVEL, {"reasoning_effort": "low"}),
        ("max", LEVEL, {"reasoning_effort": "high"}),
        ("low", SWITCH, {"enable_thinking": True}),
        ("none", SWITCH, {"enable_thinking": False}),
        ("medium", LEVEL + SWITCH, {"reasoning_effort": "medium", "enable_thinking": True}),
        ("high", "{{ my_reasoning_effort_text }}", {}),
        ("high", "", {}),
    ],
)
def test_effort_is_told_in_the_words_of_the_template(effort: Effort, template: str, wanted: dict[str, Any]) -> None:
    assert effort_kwargs(effort, template) == wanted
