"""The process of an engine, started before its model is known: torch is imported there while it is imported here."""

from __future__ import annotations

from kvarn.config import EngineConfig
from kvarn.engine.process.child import EngineChild

IMPORTS = "kvarn.backends.torch.cuda.ops"  # of an engine on an NVIDIA GPU, which takes seconds to import
_waiting: list[EngineChild] = []


def prepare_child(config: EngineConfig, num_models: int) -> None:
    """Start the process of the next model, where it is certain to have one: alone, and on an NVIDIA GPU."""
    if config.backend == "cuda" and config.own_process is not False and num_models == 1:
        _waiting.append(EngineChild(IMPORTS))


def take_child() -> EngineChild:
    """The process that waits for a model, else a new one."""
    return _waiting.pop() if _waiting else EngineChild()
