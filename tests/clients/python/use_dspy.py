"""DSPy with the larger model: a plain LM over chat and responses, Predict and ChainOfThought, streamed output."""

from __future__ import annotations

from typing import Any

import dspy
from tasks import CODER, KEY, OPENAI_URL, QUESTION, task

OPTIONS: dict[str, Any] = {"api_base": OPENAI_URL, "api_key": KEY, "cache": False, "num_retries": 0, "temperature": 0}
SUM = "What is 2 + 2?"
dspy.configure(lm=dspy.LM(f"openai/{CODER}", max_tokens=200, **OPTIONS))


@task
def a_model_answers() -> None:
    assert dspy.LM(f"openai/{CODER}", max_tokens=20, **OPTIONS)(QUESTION)


@task
def a_model_answers_over_responses() -> None:
    assert dspy.LM(f"openai/{CODER}", max_tokens=20, model_type="responses", **OPTIONS)(QUESTION)


@task
def a_signature_is_predicted() -> None:
    assert dspy.Predict("question -> answer")(question=SUM).answer


@task
def a_typed_field_is_reasoned_about() -> None:
    assert isinstance(dspy.ChainOfThought("question -> answer: int")(question=SUM).answer, int)
