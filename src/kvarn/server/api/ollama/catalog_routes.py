"""GET /api/version, /api/tags and /api/ps, POST /api/show: the models of this server, as Ollama's clients list them.

Which models there are is the operator's to say: what would change that is refused with a sentence; pull_routes.py
fetches for admins.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from kvarn.errors import AuthError
from kvarn.formats.open import open_weights
from kvarn.server.api.ollama.answer_schema import ModelTags, OllamaVersion, ShownModel
from kvarn.server.api.ollama.errors import PREFIX
from kvarn.server.api.ollama.schema import NameBody
from kvarn.server.api.ollama.translation import model_id
from kvarn.server.api.schema import body_of
from kvarn.server.chat.output.formats import OutputFormat, detect_format
from kvarn.server.dependencies import Called, Models, Settings
from kvarn.server.models.catalog import CatalogEntry

if TYPE_CHECKING:
    from kvarn.server.models.model_pool import ModelPool
    from kvarn.server.request_context import RequestContext
    from kvarn.tokenizer.tokenizer import Tokenizer

router = APIRouter(tags=["ollama"])
NEVER = "9999-12-31T23:59:59Z"  # models do not expire: they are unloaded when others need the memory


@dataclass(frozen=True, slots=True)
class _Texts:
    """What a model's tokenizer tells."""

    template: str
    capabilities: list[str]


@router.get(f"{PREFIX}version", response_model=OllamaVersion)
async def version(request: Called, settings: Settings) -> Response:
    """The version of Ollama whose API this is; clients compare it with what they need."""
    return request.reply({"version": settings.ollama_version})


@router.get(f"{PREFIX}tags", response_model=ModelTags)
async def tags(request: Called, models: Models) -> Response:
    """List the models, loaded or not."""
    return request.reply({"models": [_tag(entry) for entry in models.entries()]})


@router.get(f"{PREFIX}ps", response_model=ModelTags)
async def running(request: Called, models: Models) -> Response:
    """List the models that are loaded."""
    loaded = [entry for entry in models.entries() if entry.is_loaded]
    return request.reply({"models": [_tag(entry) | _loaded_fields(entry) for entry in loaded]})


@router.post(f"{PREFIX}show", response_model=ShownModel, openapi_extra=body_of(NameBody))
async def show(request: Called, models: Models) -> Response:
    """Describe one model; it is not loaded for that."""
    name = await _name(request, models)
    entry = models.entry(name)
    texts = await _texts(request, models, name, entry)
    file = entry.file
    kind = file.architecture or "unknown"
    return request.reply(
        {
            "modelfile": "",
            "parameters": "",
            "template": texts.template,
            "details": _details(entry),
            "model_info": {
                "general.architecture": kind,
                "general.parameter_count": file.num_parameters,
                f"{kind}.context_length": entry.context,
                f"{kind}.embedding_length": file.embedding_length,
                f"{kind}.block_count": file.num_layers,
            },
            "capabilities": texts.capabilities,
            "modified_at": _time(entry.created),
        }
    )


@router.post(f"{PREFIX}create", include_in_schema=False)
@router.post(f"{PREFIX}copy", include_in_schema=False)
@router.post(f"{PREFIX}push", include_in_schema=False)
@router.delete(f"{PREFIX}delete", include_in_schema=False)
async def manage(_request: Called) -> Response:
    """Refuse to change which models there are."""
    raise AuthError(
        "models are not created, copied, pushed or deleted through this API; the server's operator decides which "
        "models it has: see `kvarn serve --help`",
        reason="forbidden",
    )


async def _name(request: RequestContext, models: ModelPool) -> str:
    """The id of the model that the body names; ModelNotFound for others."""
    body = await request.body(NameBody)
    return models.entry(model_id(body.wanted, models.ids)).id


async def _texts(request: RequestContext, models: ModelPool, name: str, entry: CatalogEntry) -> _Texts:
    if entry.kind != "generate":
        return _Texts("", ["embedding"] if entry.kind == "embed" else [])
    if models.is_loaded(name):
        model = await request.use_model(models, name)
        return _told_by(entry, model.llm.llm.tokenizer, model.output_format)
    return await request.in_thread(lambda: _read_texts(models, name, entry))


def _read_texts(models: ModelPool, name: str, entry: CatalogEntry) -> _Texts:
    """Of a model that is not loaded: its tokenizer is read for this."""
    from kvarn.tokenizer import load_tokenizer

    source = open_weights(models.slot(name).plan.path)
    try:
        tokenizer = load_tokenizer(source)
    finally:
        source.close()
    return _told_by(entry, tokenizer, detect_format(tokenizer.chat_template, tokenizer))


def _told_by(entry: CatalogEntry, tokenizer: Tokenizer, format: OutputFormat) -> _Texts:
    able = {
        "completion": True,
        "tools": format.tool_format is not None,
        "insert": tokenizer.fim is not None or entry.can_fill,
        "thinking": format.reasoning is not None,
    }
    return _Texts(tokenizer.chat_template or "", [name for name, is_able in able.items() if is_able])


def _tag(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.id,
        "model": entry.id,
        "modified_at": _time(entry.created),
        "size": entry.file.num_bytes,
        "digest": entry.digest or "",
        "details": _details(entry),
    }


def _loaded_fields(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "size": entry.needed_bytes,
        "size_vram": 0,
        "context_length": entry.context,
        "expires_at": NEVER,
    }


def _details(entry: CatalogEntry) -> dict[str, Any]:
    file = entry.file
    return {
        "parent_model": "",
        "format": file.format,
        "family": file.architecture,
        "families": [file.architecture],
        "parameter_size": parameter_size(file.num_parameters),
        "quantization_level": file.weight_type,
    }


def parameter_size(number: int) -> str:
    """How many weights there are, as people call it: 134.5M, 8.0B."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}K"


def _time(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")
