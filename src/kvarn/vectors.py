"""Vectors of texts, for encoders: what is asked is checked, cut into groups, computed between steps and joined."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvarn.checks import check_parameter, cut
from kvarn.engine.client import EngineClient
from kvarn.engine.embed_score import embed_request, groups
from kvarn.engine.load import LoadedModel
from kvarn.errors import UnsupportedModel
from kvarn.models.encoders.text_prompts import TextPrompts
from kvarn.models.spec import Encoder, Pooling
from kvarn.prompts import TokenIds, listed_inputs, listed_pairs, pair_ids
from kvarn.submissions import encoded
from kvarn.types import MAX_PRIORITY

if TYPE_CHECKING:
    from kvarn.engine.process.process_model import ProcessModel

Float32 = npt.NDArray[np.float32]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")


class Vectors:
    """The parts of an embedding, so that a caller may wait for each group in its own way."""

    def __init__(self, model: LoadedModel | ProcessModel, client: EngineClient) -> None:
        self._model = model
        self._client = client

    def pooling(self, wanted: Pooling | None, *, normalize: bool = True, priority: int = 0) -> Pooling:
        """The pooling to use; raises if this model gives no vectors of texts, or none in the way asked for."""
        spec = self._model.spec
        if not isinstance(spec.generation, Encoder):
            raise UnsupportedModel(f"{spec.name!r} generates text; embed needs an encoder such as minilm")
        if spec.generation.classifier is not None:
            raise UnsupportedModel(f"{spec.name!r} scores pairs of texts; embed needs an encoder such as minilm")
        replace(check_parameter, show=cut).one_of("pooling", wanted, POOLINGS, optional=True)
        check_parameter.flag("normalize", normalize)
        check_parameter.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        return wanted or spec.generation.pooling

    @property
    def width(self) -> int:
        """Values of a vector."""
        return int(self.joined([], normalize=False).shape[1])

    @property
    def prompts(self) -> TextPrompts:
        """What the model wants before a text, by name."""
        return self._model.text_prompts

    def groups(self, texts: object, prompt_name: str | None = None) -> list[list[TokenIds]]:
        """Texts behind a prompt, as token ids, checked, in groups that each fit into one batch."""
        prompt = self.prompts.text(prompt_name)
        ids: list[TokenIds] = [
            encoded(self._model.tokenizer, prompt + text if isinstance(text, str) else text)
            for text in listed_inputs(texts)
        ]
        for one in ids:
            self._model.engine.admission.check_tokens("texts", one)
        return self._fitting(ids)

    def compute(self, group: Sequence[TokenIds], pooling: Pooling, *, priority: int = 0) -> Future[Float32]:
        """One group between two steps, so that callers share the engine."""
        return self._client.compute(partial(embed_request, texts=group, pooling=pooling), priority=priority)

    def joined(self, vectors: Sequence[Float32], normalize: bool) -> Float32:
        """The vectors of all groups, (n, dim), behind the model's dense layers."""
        joined = np.concatenate([np.empty((0, self._model.spec.width), np.float32), *vectors])
        joined = self._model.pooled_layers.apply(joined)
        if not normalize:
            return joined
        return np.asarray(joined / np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-12), np.float32)

    def embed(
        self,
        texts: object,
        pooling: Pooling | None = None,
        *,
        normalize: bool = True,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> Float32:
        """One vector per text, (n, dim)."""
        chosen = self.pooling(pooling, normalize=normalize, priority=priority)
        vectors = [self.compute(one, chosen, priority=priority).result() for one in self.groups(texts, prompt_name)]
        return self.joined(vectors, normalize)

    def classify(self, pairs: Sequence[tuple[str, str]], *, priority: int = 0) -> Float32:
        """The classifier's raw scores of pairs of texts, (n, labels)."""
        spec = self._model.spec
        if not isinstance(spec.generation, Encoder) or spec.generation.classifier is None:
            raise UnsupportedModel(f"{spec.name!r} has no classifier; use a cross-encoder")
        check_parameter.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        ids = [pair_ids(self._model.tokenizer, pair, spec) for pair in listed_pairs(pairs)]
        pooling = spec.generation.pooling
        vectors = [self.compute(group, pooling, priority=priority).result() for group in self._fitting(ids)]
        return self.joined(vectors, normalize=False)

    def _fitting(self, ids: Sequence[TokenIds]) -> list[list[TokenIds]]:
        engine = self._model.engine
        for one in ids:
            engine.admission.check_length(len(one), engine.admission.context)
        return list(groups(engine.kv, ids, engine.max_batch_tokens))
