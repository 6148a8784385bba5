"""What the post-processor of a tokenizer.json puts around texts, and whether the second of two has its own type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.errors import FormatError
from kvarn.tokenizer.vocabulary import Vocabulary


def bos_eos_ids(
    processor: Any, vocabulary: Vocabulary
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """The ids before a text, after it, and between two texts; None of the last: it says nothing about them."""
    try:
        return *_processor_ids(processor, vocabulary), _between_ids(processor, vocabulary)
    except (KeyError, IndexError, TypeError) as error:
        raise FormatError(f"the post-processor is incomplete: {error!r:.60}", file="tokenizer.json") from error


def _processor_ids(processor: Any, vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids a post-processor puts before and after a text."""
    if not isinstance(processor, dict):
        return (), ()
    if processor.get("type") == "Sequence":
        parts = [_processor_ids(part, vocabulary) for part in listed_objects(processor, "processors")]
        return tuple(i for part in parts for i in part[0]), tuple(i for part in reversed(parts) for i in part[1])
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return (_known_id(processor["cls"][1], vocabulary),), (_known_id(processor["sep"][1], vocabulary),)
    before: list[int] = []
    after: list[int] = []
    found = before
    for item in listed_objects(processor, "single"):
        if "Sequence" in item:
            found = after
        elif "SpecialToken" in item:
            named = processor["special_tokens"][item["SpecialToken"]["id"]]
            found.extend(_known_id(token_id, vocabulary) for token_id in named["ids"])
    return tuple(before), tuple(after)


def _between_ids(processor: Any, vocabulary: Vocabulary) -> tuple[int, ...] | None:
    """The ids between two texts; None where the post-processor says nothing about them."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        found = [_between_ids(part, vocabulary) for part in listed_objects(processor, "processors")]
        return next((one for one in found if one is not None), None)
    if processor.get("type") == "RobertaProcessing":
        return (_known_id(processor["sep"][1], vocabulary),) * 2
    items = listed_objects(processor, "pair")
    places = [number for number, item in enumerate(items) if "Sequence" in item]
    if len(places) != 2:
        return None
    named = [item["SpecialToken"]["id"] for item in items[places[0] + 1 : places[1]] if "SpecialToken" in item]
    return tuple(_known_id(i, vocabulary) for name in named for i in processor["special_tokens"][name]["ids"])


def has_second_segment(processor: Any) -> bool:
    """RoBERTa's tokenizers have one token type for both texts; a template says which."""
    if not isinstance(processor, dict):
        return True
    if processor.get("type") == "Sequence":
        return all(has_second_segment(part) for part in listed_objects(processor, "processors"))
    if processor.get("type") == "RobertaProcessing":
        return False
    texts = [item["Sequence"] for item in listed_objects(processor, "pair") if isinstance(item.get("Sequence"), dict)]
    return len(texts) != 2 or texts[1].get("type_id") != 0


def _known_id(token_id: Any, vocabulary: Vocabulary) -> int:
    if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
        raise FormatError(f"tokenizer.json: the post-processor names token {token_id!r:.20}, which does not exist")
    return token_id


def listed_objects(component: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The objects of a list of tokenizer.json."""
    value = component.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise FormatError(f"tokenizer.json: {key} is not a list of objects")
    return value
