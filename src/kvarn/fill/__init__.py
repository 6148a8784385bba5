"""Templates on a canvas: text with slots, or the skeleton of a JSON schema, for diffusion models to fill in at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.errors import InvalidParameter
from kvarn.fill.layout import Filled
from kvarn.fill.skeleton import skeleton
from kvarn.fill.template import Parts, Slot, parse_template

__all__ = ["Filled", "Slot", "template_parts"]


def template_parts(template: str | Mapping[str, Any], slots: Mapping[str, Slot] | None) -> Parts:
    """The parts of a text with slots, or of the skeleton of a JSON schema."""
    if not isinstance(template, Mapping):
        return parse_template(template, slots)
    if slots:
        raise InvalidParameter("slots describe those of a text; a JSON schema says itself what it takes", field="slots")
    return skeleton(template)
