"""What the KV cache of a model costs: layers that keep every token, and layers that keep those in a window.

bytes
  |              ____------   every token costs the full layers their share,
  |      ____----             but the windows only up to what the requests' windows hold together
  |  /---
  | /
  +------------------------ tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.models.recurrent import attentions
from kvarn.models.spec import Attention, Autoregressive, ModelSpec

KEY_TILE = 64  # backends read whole tiles of keys, from the one on in which a window begins
WINDOW_TOKENS = 6144  # by default windows have room for as many tokens, or for one of so many that the cache holds
WINDOW_PART = 8
MOST_TOKENS = 2**31 - 1  # longer than any context
FREE_TOKENS = 2**20  # there are block ids for, where they cost nothing
MARGIN = 64  # tokens of blocks that are held in part


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of so many tokens; one window group at most."""

    token_bytes: int  # of the layers that keep all
    window_token_bytes: int = 0  # of the layers that keep a window; 0: there are none
    window: int = 0  # tokens before the next that such layers keep
    least_window_tokens: int = 0  # for one request alone

    @property
    def has_windows(self) -> bool:
        return self.window_token_bytes > 0

    @property
    def is_free(self) -> bool:
        """No layer keeps anything for each token: blocks are numbers, by which prefixes are found."""
        return self.token_bytes + self.window_token_bytes == 0

    def least_bytes(self, num_tokens: int) -> int:
        """With room in the windows for one long request."""
        return self._bytes(num_tokens, self.least_window_tokens)

    def bytes_within(self, num_tokens: int, most_bytes: int) -> int:
        """With room for several, as far as it goes."""
        comfortable = max(self.least_window_tokens, WINDOW_TOKENS, num_tokens // WINDOW_PART)
        return max(self.least_bytes(num_tokens), min(self._bytes(num_tokens, comfortable), most_bytes))

    def tokens_in(self, num_bytes: int) -> int:
        """The longest request that fits."""
        if self.is_free:
            return MOST_TOKENS
        alike = num_bytes // (self.token_bytes + self.window_token_bytes)
        if alike < self.least_window_tokens or not self.has_windows:
            return alike
        if not self.token_bytes:  # every layer has a window: one request never holds more
            return MOST_TOKENS
        return (num_bytes - self.least_window_tokens * self.window_token_bytes) // self.token_bytes

    def split(self, num_bytes: int, context: int) -> tuple[int, int]:
        """Tokens that the layers keep, and those with windows: as many of both as the context leaves room for."""
        if self.is_free:
            return max(context, FREE_TOKENS), 0
        num_tokens = max(context, num_bytes // (self.token_bytes + self.window_token_bytes))
        if not self.has_windows:
            return num_tokens, 0
        left_tokens = (num_bytes - num_tokens * self.token_bytes) // self.window_token_bytes
        return num_tokens, max(min(num_tokens, self.least_window_tokens), min(num_tokens, left_tokens))

    def _bytes(self, num_tokens: int, window_tokens: int) -> int:
        return num_tokens * self.token_bytes + min(num_tokens, window_tokens) * self.window_token_bytes


def cache_cost(spec: ModelSpec, layer_bytes: Sequence[int], window_step: int | None) -> CacheCost:
    """The cost of a cache whose layers take so many bytes for a token; where windows bring nothing, all keep all.

    window_step: rows of a step, where what lies before windows is freed; None: it is not.
    """
    windowed = windowed_layers(spec)
    if window_step is None or not any(windowed):
        return CacheCost(sum(layer_bytes))
    window = KEY_TILE + max(attention.window or 0 for attention in attentions(spec))
    least = window + window_step + MARGIN
    if least >= spec.context_length:
        return CacheCost(sum(layer_bytes))
    window_bytes = sum(size for size, is_windowed in zip(layer_bytes, windowed, strict=True) if is_windowed)
    return CacheCost(sum(layer_bytes) - window_bytes, window_bytes, window, least)


def windowed_layers(spec: ModelSpec) -> tuple[bool, ...]:
    """The layers whose keys before their window nobody reads again; an encoder computes a text in one piece."""
    is_decoder = isinstance(spec.generation, Autoregressive)
    mixers = [block.mixer for block in spec.blocks]
    has_window = [isinstance(one, Attention) and one.window is not None and one.mask == "causal" for one in mixers]
    read_whole = {
        mixer.kv_source
        for mixer, is_short in zip(mixers, has_window, strict=True)
        if isinstance(mixer, Attention) and not is_short
    }
    return tuple(is_decoder and is_short and i not in read_whole for i, is_short in enumerate(has_window))
