"""What the scripts of all Python clients share: where the server is, and a line of JSON about each task done."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel

URL, TOKENIZER = sys.argv[1:3]  # the second is a folder with a tokenizer
OPENAI_URL = f"{URL}/v1"
KEY = "none"
CHAT, EMBEDDING, CODER = "smollm2", "minilm", "coder"
QUESTION = "Say hi."  # the answer is short and ends by itself
WEATHER = "What is the weather in Oslo?"
MAX_TOKENS = 100  # of an answer in JSON; so small a model may fill it with spaces
DIMENSIONS = 384  # of minilm


class City(StrEnum):
    OSLO = "Oslo"
    PARIS = "Paris"


class Verdict(BaseModel):
    """What the model shall say about a city."""

    city: Literal["Oslo", "Paris"]
    is_warm: bool


def task(work: Callable[[], Any]) -> None:
    """Do it at once and tell how it went."""
    _do(work.__name__, work)


def task_of(subject: str) -> Callable[[Callable[[], Any]], None]:
    """The same, of one dialect or mode of several."""
    return lambda work: _do(f"{subject}: {work.__name__}", work)


def follows(arguments: Any) -> bool:
    """Whether a call names a city that the tool knows."""
    return arguments["city"] in list(City)


def _do(name: str, work: Callable[[], Any]) -> None:
    error = None
    try:
        asyncio.run(work()) if inspect.iscoroutinefunction(work) else work()
    except Exception:
        error = traceback.format_exc()[-3000:]
    print(json.dumps({"task": name, "error": error}), flush=True)
