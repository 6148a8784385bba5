"""What a server can load, before any of it is loaded: ids, files, memory plans and the cards clients see.

Only the operator's configuration is read here; a name from a request is compared with the ids, never resolved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvarn.backends.select import device_share, device_weights, is_gpu, kv_dtype, memory_remedies, window_step
from kvarn.config import DEFAULT_LORA_BYTES, EngineConfig, is_offline
from kvarn.engine.drafting.load_draft import draft_bytes
from kvarn.errors import ConfigError, DoesNotFit
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.hub import ALIASES, BUNDLED, local_draft, resolve, store
from kvarn.hub.locate import parse
from kvarn.hub.names import LocalName, parse_remote, split_id
from kvarn.machine import MemoryAvailable
from kvarn.models.describe import Description, describe
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.memory_plan import MemoryPlan, plan_memory
from kvarn.models.sampling_defaults import DIFFUSION_DEFAULTS
from kvarn.models.spec import Encoder, MaskedDiffusion, ModelSpec
from kvarn.server.models.file_digests import file_digest

ModelKind = Literal["generate", "embed", "rerank"]
LORA_SHARE = 8  # of a server's memory: one part in so many, at most, for the adapters of each model
ENOUGH_CONTEXT = 4096  # a model that would get less than this from its equal share may take more


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """What a model's file is, whether or not it is loaded."""

    architecture: str = ""
    format: Literal["gguf", "safetensors"] = "gguf"
    num_bytes: int = 0
    num_parameters: int = 0
    weight_type: str = ""  # of most of its bytes
    num_layers: int = 0
    embedding_length: int = 0


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """What clients see of a model."""

    id: str
    kind: ModelKind
    context: int  # tokens a request may have, prompt and answer together
    created: int  # Unix time of the model's file
    needed_bytes: int  # memory at most, by plan
    digest: str | None = None  # sha256 of the weights' file; None before the first load of a local one
    is_loaded: bool = False
    is_pinned: bool = False
    parent: str | None = None  # of an adapter: the model's id
    file: CatalogFile = CatalogFile()
    is_diffusion: bool = False
    can_fill: bool = False  # templates, and what stands between two texts: its canvas is masked
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults that are not Kvarn's own


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A model that can be loaded: where it lies and with which engine it fits."""

    entry: CatalogEntry
    path: Path
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory a model may be planned for, in bytes."""

    share: int  # when all configured models shall stay loaded together
    whole: int | None  # when it may displace all that are not pinned; None: it may not
    is_shared: bool  # there are other models


def model_ids(names: Iterable[str]) -> Mapping[str, str]:
    """Map the id that clients use to the operator's name of each model, which may be written as id=name."""
    ids: dict[str, str] = {}
    for given in names:
        chosen, name = split_id(given)
        model_id = _id_of(name) if chosen is None else chosen
        if model_id in ids:
            raise ConfigError(
                f"the models {ids[model_id]!r} and {name!r} are both called {model_id!r}; "
                f"give one another name, as other={name}"
            )
        ids[model_id] = name
    if not ids:
        raise ConfigError("no model is configured; give at least one --model")
    return ids


def pinned_id(names: Mapping[str, str], wanted: str) -> str:
    """The id of a pinned model, written as an id or as the name it was configured with."""
    for model_id, name in names.items():
        if wanted in (model_id, name, f"{model_id}={name}"):
            return model_id
    raise ConfigError(f"pinned names {wanted!r:.80}, which is not among the models {', '.join(names)}; add it there")


def find_files(name: str) -> Path:
    """Find a model's files, fetching them if need be: the same path for all names of one model. Blocks."""
    return resolve(name, offline=is_offline()).resolve()


def with_process_choice(engine: EngineConfig, num_models: int) -> EngineConfig:
    """Whether the engine gets a process of its own: where it pays, and no other has to take turns with it. Blocks."""
    if engine.own_process and num_models > 1:
        raise ConfigError(
            f"engine.own_process is true and there are {num_models} models; engines take turns within one process "
            "only: serve one model, or leave own_process out"
        )
    if engine.draft_model is not None and num_models > 1:
        raise ConfigError(
            f"engine.draft_model is {engine.draft_model!r:.80} and there are {num_models} models; it guesses for one: "
            "serve that one alone, or leave draft_model out"
        )
    if engine.own_process is not None:
        return engine
    return replace(engine, own_process=num_models == 1 and is_gpu(engine))


def with_adapters(engine: EngineConfig, num_bytes: int) -> EngineConfig:
    """Count adapters in the plans of a server that loads some: num_bytes is its memory."""
    if engine.lora_bytes is not None:
        return engine
    return replace(engine, lora_bytes=min(DEFAULT_LORA_BYTES, num_bytes // LORA_SHARE))


def plan_load(model_id: str, name: str, engine: EngineConfig, room: MemoryRoom) -> LoadPlan:
    """Plan the memory of a model that was found. Blocks.

    Where several models share one context=, those made for less keep their own.
    """
    plan = _planned(model_id, name, engine, room)
    assert plan is not None
    return plan


def plan_beside(model_id: str, name: str, engine: EngineConfig, num_bytes: int) -> LoadPlan | None:
    """Plan a model beside those that are loaded; None where that would leave it less than a useful context. Blocks."""
    return _planned(model_id, name, engine, MemoryRoom(num_bytes, None, is_shared=True))


def _planned(model_id: str, name: str, engine: EngineConfig, room: MemoryRoom) -> LoadPlan | None:
    path, engine = resolve(name, offline=is_offline()), local_draft(engine)
    source = open_weights(path)
    try:
        description = describe(source, engine.context)
        if room.is_shared and engine.context is not None:
            engine = replace(engine, context=min(engine.context, description.spec.context_length))
        plan = _plan(model_id, description, engine, room)
        spec, file = description.spec, _facts(source, description.spec)
    finally:
        source.close()
    if plan is None:
        return None
    entry = CatalogEntry(
        id=model_id,
        kind=_kind(spec),
        context=plan.context,
        created=int(_weights_file(path).stat().st_mtime),
        needed_bytes=plan.needed_bytes,
        digest=_recorded_digest(name),
        file=file,
        is_diffusion=spec.is_diffusion,
        can_fill=isinstance(spec.generation, MaskedDiffusion),
        sampling=_sampling(description),
    )
    return LoadPlan(entry, path, _settled(engine, spec, plan))


def with_digest(load_plan: LoadPlan) -> LoadPlan:
    """Hash the weights unless their digest is known. Blocks."""
    if load_plan.entry.digest is not None:
        return load_plan
    digest = file_digest(_weights_file(load_plan.path))
    return replace(load_plan, entry=replace(load_plan.entry, digest=digest))


def _id_of(name: str) -> str:
    if name in ALIASES or name in BUNDLED or parse_remote(name) is not None:
        return name
    try:
        return Path(name).expanduser().absolute().name
    except RuntimeError:
        raise ConfigError(f"model {name!r:.80} begins with a user that is not here; write the whole path") from None


def _facts(source: WeightSource, spec: ModelSpec) -> CatalogFile:
    sizes: Counter[str] = Counter()
    for info in source.tensors.values():
        sizes[info.type.name] += info.num_bytes
    return CatalogFile(
        architecture=spec.architecture,
        format="gguf" if source.metadata.get("hf") is None else "safetensors",
        num_bytes=sizes.total(),
        num_parameters=sum(info.num_values for info in source.tensors.values()),
        weight_type=sizes.most_common(1)[0][0],
        num_layers=len(spec.blocks),
        embedding_length=spec.width,
    )


def _sampling(description: Description) -> Mapping[str, Any]:
    generation = description.spec.generation
    if isinstance(generation, UniformDiffusion):
        return {}  # its steps have temperatures of their own
    return {**(DIFFUSION_DEFAULTS if isinstance(generation, MaskedDiffusion) else {}), **description.recommended}


def _kind(spec: ModelSpec) -> ModelKind:
    if not isinstance(spec.generation, Encoder):
        return "generate"
    return "embed" if spec.generation.classifier is None else "rerank"


def _plan(model_id: str, description: Description, engine: EngineConfig, room: MemoryRoom) -> MemoryPlan | None:
    """Within its share if that leaves a useful context, else within all there is; None where it may not have that."""
    enough = min(ENOUGH_CONTEXT, description.spec.context_length, engine.context or ENOUGH_CONTEXT)
    try:
        plan = _plan_within(description, engine, room.share, "its share of the server's memory")
        if plan.context >= enough:
            return plan
    except DoesNotFit:
        pass  # its share is too small: perhaps the whole is not
    if room.whole is None:
        return None
    try:
        return _plan_within(description, engine, room.whole, "the server's memory beside its pinned models")
    except DoesNotFit as error:
        raise DoesNotFit(
            f"model {model_id!r}: {error}", needed_bytes=error.needed_bytes, available_bytes=error.available_bytes
        ) from None


def _plan_within(description: Description, engine: EngineConfig, num_bytes: int, reason: str) -> MemoryPlan:
    available = MemoryAvailable(num_bytes, reason)
    weights = device_weights(description.spec, description.weights, engine)
    share, held = device_share(description.spec, weights, engine)
    return plan_memory(
        share,
        held,
        engine.context,
        engine.kv_bytes,
        available,
        kv_dtype=kv_dtype(engine),
        max_running=engine.max_running,
        window_step=window_step(engine),
        step_rows=engine.max_batch_tokens,
        remedies=memory_remedies(engine),
        draft_bytes=draft_bytes(engine, description),
        lora_bytes=engine.lora_bytes or 0,
    )


def _settled(engine: EngineConfig, spec: ModelSpec, plan: MemoryPlan) -> EngineConfig:
    """The plan as options, so that loading comes to the same sizes whatever the machine's memory is by then."""
    kv_bytes = None if isinstance(spec.generation, Encoder) else plan.kv_bytes or None  # 0: nothing is cached
    max_running = min(engine.max_running, plan.max_sequences) if plan.num_states else engine.max_running
    return replace(engine, context=plan.context, kv_bytes=kv_bytes, max_running=max_running)


def _recorded_digest(name: str) -> str | None:
    target = parse(name)
    stored = None if isinstance(target, LocalName) else store.find(target)
    return None if stored is None else stored.manifest.digest


def _weights_file(path: Path) -> Path:
    """The file that stands for the model: the largest of a folder, as in the store's manifests."""
    if not path.is_dir():
        return path
    return max((file for file in path.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
