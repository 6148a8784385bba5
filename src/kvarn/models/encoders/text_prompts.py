"""The prompts that an embedding model was trained with, by name: config_sentence_transformers.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.checks import check_parameter, short
from kvarn.errors import FormatError, InvalidParameter
from kvarn.formats.strict_json import read_optional
from kvarn.formats.weights import WeightSource

FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """What is put before a text to embed, by the name of a prompt such as query or document."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""  # put before a text for which none is named

    @staticmethod
    def read(weights: WeightSource) -> TextPrompts:
        """Those of a folder; GGUF files have none."""
        folder = weights.metadata.get("hf_folder")
        config = {} if folder is None else read_optional(os.path.join(folder, FILE))
        prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise FormatError(f"prompts are {short(prompts)}; expected a text for each name", file=FILE)
        if default is not None and default not in prompts:
            raise FormatError(f"default_prompt_name is {short(default)}, which is no prompt", file=FILE)
        return TextPrompts(prompts, "" if default is None else prompts[default])

    def text(self, name: str | None) -> str:
        """The prompt to put before a text; raises where the model has none of this name."""
        if name is not None and not self.by_name:
            raise InvalidParameter("the model has no prompts of its own; leave prompt_name out", field="prompt_name")
        check_parameter.one_of("prompt_name", name, tuple(self.by_name), optional=True)
        return self.default if name is None else self.by_name[name]
