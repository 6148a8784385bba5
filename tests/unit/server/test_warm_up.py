"""A model that is served is warmed up with what it honours."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvarn.server.models.served_model import _warm_up
from kvarn.types import SamplingParams
from tests.canvas_engines import CanvasModel


@dataclass
class Asked:
    """Stands for an AsyncLLM: keeps the parameters it was asked with."""

    params: list[SamplingParams] = field(default_factory=list)
    llm: Any = field(default_factory=lambda: SimpleNamespace(tokenizer=SimpleNamespace(prepare_chat=lambda: None)))

    async def generate(self, _text: str, params: SamplingParams) -> None:
        self.params.append(params)


@pytest.mark.parametrize("is_diffusion", [True, False])
def test_a_canvas_model_takes_the_request_it_is_warmed_up_with(
    tmp_path_factory: pytest.TempPathFactory, is_diffusion: bool
) -> None:
    asked, entry = Asked(), SimpleNamespace(kind="generate", is_diffusion=is_diffusion)
    asyncio.run(_warm_up(cast(Any, asked), cast(Any, entry)))
    (params,) = asked.params
    if is_diffusion:
        engine = CanvasModel(0, tmp_path_factory.mktemp("model")).engine()
        assert engine.decoder.bound([5, 6], params, 1).max_tokens == 1
        assert params.diffusion is not None
        assert params.diffusion.steps == 1
    else:
        assert params.temperature == 0.0
