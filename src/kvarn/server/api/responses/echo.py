"""The part of a response that repeats the request: what was understood, defaults included."""

from __future__ import annotations

from typing import Any

from kvarn.server.api.responses.schema import FunctionChoice, FunctionTool, ResponsesBody


def echo_of(body: ResponsesBody, response_id: str, model: str, created_at: int) -> dict[str, Any]:
    """All fields of a response that are known before the first token."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": _choice(body.tool_choice),
        "tools": [tool.model_dump() for tool in body.tools or () if isinstance(tool, FunctionTool)],
        "max_output_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": _format(body)},
        "background": False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "truncation": "disabled",
    }


def _choice(choice: str | FunctionChoice | None) -> str | dict[str, Any]:
    return choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto"


def _format(body: ResponsesBody) -> dict[str, Any]:
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
