"""Render a conversation with the model's chat template, and encode the result.

Control tokens the template writes become control tokens. The same characters inside a message do not: before
rendering, a mark is put after the first character of each, and no control token may cover a marked character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvarn.errors import InvalidParameter, TemplateError
from kvarn.tokenizer.chat.messages import ChatRequest, map_strings
from kvarn.tokenizer.chat.template_worker import TemplateWorker, shared_worker
from kvarn.tokenizer.special_tokens import SpecialMatcher

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation, and the offsets of characters that no control token may cover."""

    text: str
    plain: tuple[int, ...]


def encode_chat(tokenizer: Tokenizer, request: ChatRequest, worker: TemplateWorker | None = None) -> list[int]:
    """Return the ids of a conversation; bos precedes it once, whether the template writes it or not."""
    chat = render_chat(tokenizer, request, worker)
    ids = tokenizer.encode_marked(chat.text, parse_special=True, plain=chat.plain)
    prefix = list(tokenizer.prefix_ids)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def render_chat(tokenizer: Tokenizer, request: ChatRequest, worker: TemplateWorker | None = None) -> RenderedChat:
    """Return what the model's template makes of a conversation."""
    template = tokenizer.chat_template
    if template is None:
        raise TemplateError("the model has no chat template; give it a text to continue instead of messages")
    context = _context(request, template)
    mark = _unused_character(template, context)
    marked = map_strings("the conversation", context, lambda text: _with_marks(text, mark, tokenizer.forbidden_matcher))
    names = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text}
    rendered = (worker or shared_worker()).render(template, marked | names)
    return _without_marks(rendered, mark)


def _context(request: ChatRequest, template: str) -> dict[str, Any]:
    messages = request.messages if "developer" in template else list(map(_with_known_role, request.messages))
    context = {**request.kwargs, "messages": messages, "add_generation_prompt": request.add_generation_prompt}
    return context if request.tools is None else {**context, "tools": request.tools}  # undefined, not None


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Templates without the role `developer`, which is newer than `system`, would drop its messages."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_marks(text: str, mark: str, forbidden: SpecialMatcher) -> str:
    starts = forbidden.possible_starts(text)
    if not starts:
        return text
    cuts = [0, *(start + 1 for start in starts), len(text)]
    return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def _without_marks(rendered: str, mark: str) -> RenderedChat:
    pieces = rendered.split(mark)
    offsets = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        offsets.append(max(0, length - 1))
    return RenderedChat("".join(pieces), tuple(offsets))


def _unused_character(template: str, context: dict[str, Any]) -> str:
    """Return a character that is neither in the template nor in the conversation, so that no client can forge it."""
    used = json.dumps(context, ensure_ascii=False)
    for character in _candidates():
        if character not in used and character not in template:
            return character
    raise InvalidParameter("the conversation uses every private-use character there is; leave one out")


def _candidates() -> Iterator[str]:
    yield from map(chr, range(0xFDD0, 0xFDF0))  # noncharacters: no text has them by right
    yield from map(chr, range(0xF0000, 0xFFFFE))
