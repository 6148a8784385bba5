"""Layers that carry a state from token to token: which they are, and how large it is."""

from __future__ import annotations

from kvarn.models.spec import Attention, Block, LatentAttention, ModelSpec
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, NoMixer, ShortConv

Recurrent = GatedDeltaNet | ShortConv | Mamba2 | Mamba
MIN_STATES = 4  # slots for one request, and for a text that is scored or embedded beside it
SLOTS_OF_SEQUENCE = 4  # half of them for snapshots


def recurrent_of(block: Block) -> Recurrent | None:
    """The layer with a state that stands in the place of attention, or beside it."""
    mixer = block.state or block.mixer
    return None if isinstance(mixer, Attention | LatentAttention | NoMixer) else mixer


def conv_channels(layer: Recurrent) -> int:
    """Channels whose last kernel - 1 rows are part of the state."""
    if isinstance(layer, ShortConv | Mamba):
        return layer.width
    if isinstance(layer, Mamba2):
        return layer.values + 2 * layer.num_groups * layer.state_dim
    return 2 * layer.num_key_heads * layer.key_dim + layer.num_value_heads * layer.value_dim


def state_floats(layer: Recurrent | None) -> int:
    """Floats of one sequence's state: (kernel - 1, channels), then what the heads or channels hold."""
    if layer is None:
        return 0
    rows = (layer.kernel - 1) * conv_channels(layer)
    if isinstance(layer, ShortConv):
        return rows
    if isinstance(layer, Mamba):
        return rows + layer.width * layer.state_dim
    if isinstance(layer, Mamba2):
        return rows + layer.values * layer.state_dim
    return rows + layer.num_value_heads * layer.key_dim * layer.value_dim


def state_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Floats of a state, layer by layer; empty where no layer has one."""
    floats = tuple(state_floats(recurrent_of(block)) for block in spec.blocks)
    return floats if any(floats) else ()


def kv_layers(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(KV heads, head_dim) layer by layer; (0, 0) where nothing is cached for each token."""
    return tuple(_kv_shape(block.mixer) for block in spec.blocks)


def _kv_shape(layer: Attention | LatentAttention | Recurrent | NoMixer) -> tuple[int, int]:
    if isinstance(layer, LatentAttention):
        return 1, layer.row_dim
    if not isinstance(layer, Attention) or layer.kv_source is not None:
        return 0, 0
    return layer.num_kv_heads, layer.head_dim


def latent_layers(spec: ModelSpec) -> tuple[bool, ...]:
    """Which layers have their values within their keys; empty where none has."""
    found = tuple(isinstance(block.mixer, LatentAttention) for block in spec.blocks)
    return found if any(found) else ()


def attentions(spec: ModelSpec) -> tuple[Attention, ...]:
    """Of the layers that have one, in order."""
    return tuple(block.mixer for block in spec.blocks if isinstance(block.mixer, Attention))
