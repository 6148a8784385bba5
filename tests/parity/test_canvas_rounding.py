"""How far apart the reference and transformers may be on canvases: by their rounding alone.

A step feeds its logits back, so that what is rounded grows from step to step, and with larger weights it grows fast:
with those of 1.2 / sqrt(n) the two are up to 1e-3 apart. In float64 on both sides they are the same model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.backends.reference.backend import ReferenceBackend
from tests.canvas_models import canvas_folder
from tests.conftest import Size
from tests.parity.test_canvases import PROMPTS, SHAPES, TEMPERATURES, canvases_of, prompt_of, run_steps

torch = pytest.importorskip("torch")

GAIN = 1.2
OURS = ("kvarn.backends.reference", "kvarn.backends.host_sampling", "kvarn.sampling")
SAME = 1e-5  # measured: 1.4e-6 at most


class Doubled:
    """A module of numbers whose float32 is float64."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.float32 = self.float = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def in_float64() -> Iterator[None]:
    """Let the reference and the published class compute in float64."""
    from transformers.models.diffusion_gemma import modeling_diffusion_gemma

    ours = [module for name, module in sys.modules.items() if name.startswith(OURS) and hasattr(module, "np")]
    places = [(module, "np") for module in ours] + [(modeling_diffusion_gemma, "torch")]
    with pytest.MonkeyPatch.context() as patched:
        for module, name in places:
            patched.setattr(module, name, Doubled(getattr(module, name)))
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def published(model: Any, shape: int, length: int) -> list[Any]:
    """The logits of all steps; the temperature is rounded as the reference's is."""
    text, found = prompt_of(length), []
    for _ in range(2):
        fed, canvases = None, canvases_of(shape)
        for canvas, t in zip(canvases, TEMPERATURES, strict=True):
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([text]),
                    decoder_input_ids=torch.tensor([canvas]),
                    self_conditioning_logits=fed,
                ).logits
            found.append(logits[0].numpy())
            fed = logits / float(np.float32(t))
        text = text + canvases[-1]
    return found


def doubled(model: Any) -> Any:
    """The model in float64, with the numbers that its class rounds when it is made."""
    model = model.double()
    text = model.config.text_config
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # the fast one has no float64
    for name, values in model.named_buffers():
        if name.endswith("embed_scale"):
            values.fill_(math.sqrt(text.hidden_size))
        for kind in {*text.layer_types}:
            if name.endswith(f"{kind}_inv_freq"):
                powers = torch.arange(len(values), dtype=torch.float64) / len(values)
                exact = torch.where(values == 0, 0.0, text.rope_parameters[kind]["rope_theta"] ** -powers)
                torch.testing.assert_close(values, exact, rtol=1e-6, atol=0)
                values.copy_(exact)
    return model


def apart(ones: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


def test_what_is_between_them_is_rounding(tmp_path: Path, size: Size) -> None:
    cases = list(product(SHAPES, PROMPTS))
    for shape, length in cases[-size(1, len(cases)) :]:
        model, path = canvas_folder(shape, tmp_path, gain=GAIN)
        theirs, ours = published(model, shape, length), run_steps(ReferenceBackend(), path, shape, length)
        with in_float64():
            exact = published(doubled(model), shape, length)
            ours_exact = run_steps(ReferenceBackend(), path, shape, length)
        assert exact[0].dtype == ours_exact[0].dtype == np.float64
        assert apart(ours_exact, exact) <= min(SAME, apart(ours, theirs) / 50)
