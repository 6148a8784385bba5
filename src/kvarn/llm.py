"""kvarn.LLM: load a model, then generate, chat, stream, score or embed. Thin: the engine does the work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import numpy as np
import numpy.typing as npt

from kvarn.config import EngineConfig, is_offline
from kvarn.engine.load import load_model
from kvarn.engine.passes import embed_tokens, score_tokens
from kvarn.engine.runner import EventStream, Runner
from kvarn.errors import ConfigError, InvalidParameter, UnsupportedModel
from kvarn.hub import DEFAULT_MODEL, OnProgress, resolve
from kvarn.models.memory import MemoryPlan
from kvarn.models.spec import Encoder, ModelSpec, Pooling
from kvarn.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

TokenIds = Sequence[int]
Prompt = str | TokenIds
Prompts = list[str] | list[list[int]] | list[tuple[int, ...]]
Float32 = npt.NDArray[np.float32]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")


class LLM:
    """A loaded model. Methods may be called from several threads; close() frees everything."""

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        threads: int | None = None,
        context: int | None = None,
        kv_bytes: int | None = None,
        backend: str | None = None,
        config: EngineConfig | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        """Fetch the model if it is not here yet, and load it.

        model: a path, an alias, `pypi:package` or `hf:org/repo`. None is chosen from machine and model.
        progress(done, total, label) is called while downloading and loading.
        """
        given = {"threads": threads, "context": context, "kv_bytes": kv_bytes, "backend": backend}
        self.config = _config(config, {name: value for name, value in given.items() if value is not None})
        path = resolve(_model_name(model), offline=is_offline(), on_progress=progress)
        on_load = None if progress is None else lambda done, total: progress(done, total, "loading")
        self._model = load_model(path, self.config, on_load)
        self._runner = Runner(self._model.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def memory(self) -> MemoryPlan:
        return self._model.memory

    @property
    def context(self) -> int:
        """Tokens a request may have, prompt and answer together."""
        return self._model.engine.admission.context

    @property
    def backend_name(self) -> str:
        return self._model.backend.name

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(self, prompt: Prompts, params: SamplingParams | None = None) -> list[Completion]: ...

    def generate(self, prompt: Prompt | Prompts, params: SamplingParams | None = None) -> Completion | list[Completion]:
        """Continue a text or token ids; a list of them gives a list of completions."""
        given = _listed(prompt)
        if isinstance(given, str) or isinstance(given[0], int | np.integer):
            return self._submit(self._encode(given), params).completion()
        prompts = [self._encode(one) for one in given]
        streams: list[EventStream] = []
        try:
            streams.extend(self._submit(ids, params) for ids in prompts)
            return [stream.completion() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, tools: Sequence[Any] | None = None
    ) -> Completion:
        """Answer a conversation through the model's chat template."""
        return self._answer(messages, params, tools).completion()

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
    ) -> EventStream:
        """Events as tokens are chosen, for a text, token ids or messages. Closing the iterator cancels."""
        if _is_messages(prompt):
            return self._answer(prompt, params, tools)
        given = _listed(prompt)
        if not isinstance(given, str) and isinstance(given[0], str):
            raise InvalidParameter(f"the prompt is a list of {len(given)} texts; stream takes one, generate several")
        return self._submit(self._encode(given), params)

    def score(self, token_ids: TokenIds) -> Float32:
        """Log-probability of each token after the first, given those before it: (n - 1)."""
        self._require_generator("score")
        ids = _whole_numbers(token_ids)
        engine = self._model.engine
        engine.admission.check_tokens("token_ids", ids)
        engine.admission.check_length(len(ids), self.context)
        with self._runner.exclusively(len(ids)) as engine:
            return score_tokens(engine.backend, engine.kv, ids, engine.max_batch_tokens)

    def embed(self, texts: str | Sequence[str], pooling: Pooling | None = None, normalize: bool = True) -> Float32:
        """One vector per text, (n, dim); for encoder models."""
        pooling = self._pooling(pooling)
        ids = [self.tokenizer.encode(text) for text in _texts(texts)]
        for one in ids:
            self._model.engine.admission.check_length(len(one), self.context)
        if not ids:
            return np.empty((0, self.spec.width), np.float32)
        with self._runner.exclusively(0) as engine:
            vectors = embed_tokens(engine.backend, engine.kv, ids, pooling, engine.max_batch_tokens)
        if not normalize:
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)

    def close(self) -> None:
        """Free weights, cache and helper processes; later calls raise."""
        self._runner.close(self._model.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, messages: Sequence[Message], params: SamplingParams | None, tools: Sequence[Any] | None
    ) -> EventStream:
        self._require_generator("chat")
        return self._submit(self.tokenizer.encode_chat(messages, tools=tools), params, starts_text=True)

    def _submit(self, ids: TokenIds, params: SamplingParams | None, *, starts_text: bool = False) -> EventStream:
        self._require_generator("generate")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidParameter(f"params is {params!r:.60}; give a SamplingParams")
        return self._runner.submit(ids, params or SamplingParams(), starts_text=starts_text)

    def _encode(self, prompt: Prompt | object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return _whole_numbers(prompt)

    def _pooling(self, pooling: Pooling | None) -> Pooling:
        if not isinstance(self.spec.generation, Encoder):
            raise UnsupportedModel(f"{self.spec.name!r} generates text; embed needs an encoder such as minilm")
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidParameter(f"pooling is {pooling!r:.60}; choose one of {', '.join(POOLINGS)}")
        return pooling or self.spec.generation.pooling

    def _require_generator(self, what: str) -> None:
        if isinstance(self.spec.generation, Encoder):
            raise UnsupportedModel(f"{self.spec.name!r} is an encoder and cannot {what}; use embed, or another model")


def _config(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    if config is None:
        return EngineConfig(**options)
    if options:
        raise ConfigError(f"config= and {', '.join(options)}= were both given; put everything into config=")
    return config


def _model_name(model: object) -> str:
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if isinstance(name, str):
            return name
    raise ConfigError(f"model is {model!r:.60}; give a path, an alias, pypi:package or hf:org/repo")


def _listed(prompt: object) -> str | list[Any]:
    """A text as it is; anything else as a list that is not empty, so that an iterator is read once."""
    if isinstance(prompt, str):
        return prompt
    items = _items(prompt)
    if not items:
        raise InvalidParameter("the prompt is an empty list; give at least one prompt or token")
    return items


def _items(prompt: object) -> list[Any]:
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping | Set):
        raise InvalidParameter(f"the prompt is {prompt!r:.60}; give a string, token ids, or a list of them")
    return list(prompt)


def _texts(texts: object) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, bytes | Mapping | Set) else None
    if given is None or not all(isinstance(text, str) for text in given):
        raise InvalidParameter(f"texts is {texts!r:.60}; give a string or a list of strings")
    return given


def _is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def _whole_numbers(ids: object) -> list[int]:
    """Token ids as plain integers; NumPy's count as such, bools and floats do not."""
    numbers = []
    for token_id in _items(ids):
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise InvalidParameter(f"a token id is {token_id!r:.60}; give whole numbers")
        numbers.append(int(token_id))
    return numbers
