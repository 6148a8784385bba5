"""A model's hyperparameters, whichever file they come from, each checked against its bounds when read.

A hyperparameter has one name here and two spellings: a GGUF key (after the architecture's prefix) and a key of
config.json. Records which keys were read, so that a key that no code understood is refused and never silently ignored.
Of config.json, only the keys that the model type has are read. Does not know which architecture needs which of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvarn.checks import short
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.weights import WeightSource
from kvarn.models.config.families import FAMILIES
from kvarn.models.config.keys import changes_arithmetic
from kvarn.models.hparam_names import ACTIVATIONS, GGUF_NEUTRAL, HARMLESS, HPARAMS, ONE_NUMBER, HParam
from kvarn.models.spec import Activation

_MISSING: Final = object()


class HParams:
    """Reads the hyperparameters of one model, whose tensors are already under canonical names."""

    def __init__(self, weights: WeightSource, architecture: str, context: int | None = None) -> None:
        self.weights = weights
        self.architecture = architecture
        self.requested_context = context
        self.notes: dict[str, None] = {}  # what a user should know about how the model is run, in order
        hf = weights.metadata.get("hf")
        self.is_gguf = hf is None
        self._family: Mapping[str, Any] = {} if hf is None else FAMILIES[architecture]
        self._metadata = weights.metadata if hf is None else {**self._family, **text_config(hf)}
        self._read_keys: set[str] = set()

    def lookup(self, gguf: str | None, *hf: str, table: Mapping[str, Any] | None = None) -> tuple[str, Any]:
        """Return the spelling found and its value, or the first spelling and _MISSING; null counts as missing."""
        names = tuple(name for name in hf if table is not None or name in self._family)
        if self.is_gguf:
            names = (f"{self.architecture}.{gguf}",) if gguf else ()
        if table is None:
            self._read_keys.update(names)
        values = self._metadata if table is None else table
        found = [(name, values[name]) for name in names if values.get(name) is not None]
        if found and found[0][0] in ONE_NUMBER:
            self._refuse_two_numbers(names)
        return found[0] if found else ((names or hf or (str(gguf),))[0], _MISSING)

    def _refuse_two_numbers(self, names: Sequence[str]) -> None:
        config = text_config(self.weights.metadata["hf"])
        given = {name: config[name] for name in names if config.get(name) is not None}
        if len({str(value) for value in given.values()}) > 1:
            listed = " and ".join(f"{name} = {short(value)}" for name, value in given.items())
            raise self.format_error(f"config.json has {listed}; they are names of one number")

    def integer(self, name: str, default: Any = _MISSING, table: Mapping[str, Any] | None = None) -> Any:
        """Read an integer."""
        hparam = HPARAMS[name]
        key, value = self.lookup(hparam.gguf, *hparam.hf, table=table)
        return self._checked(key, value, hparam, default, is_integer=True)

    def number(self, name: str, default: Any = _MISSING, table: Mapping[str, Any] | None = None) -> Any:
        """Read a real number, given as an integer or a float."""
        hparam = HPARAMS[name]
        key, value = self.lookup(hparam.gguf, *hparam.hf, table=table)
        return self._checked(key, value, hparam, default, is_integer=False)

    def per_layer(self, name: str, num_layers: int, default: Any = _MISSING) -> tuple[int, ...]:
        """Read one integer per layer; a single one holds for all layers."""
        hparam = HPARAMS[name]
        key, value = self.lookup(hparam.gguf, *hparam.hf)
        if value is _MISSING or not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            return (self._checked(key, value, hparam, default, is_integer=True),) * num_layers
        if len(value) != num_layers:
            raise self.format_error(f"{key} has {len(value)} entries for {num_layers} layers")
        return tuple(self._checked(f"{key}[{i}]", v, hparam, default, is_integer=True) for i, v in enumerate(value))

    def flag(self, gguf: str | None, hf: str, default: bool) -> bool:
        """Read a boolean."""
        key, value = self.lookup(gguf, hf)
        if value is _MISSING:
            return default
        if not isinstance(value, bool | np.bool_):
            raise self.format_error(f"{key} is {short(value)}; expected true or false")
        return bool(value)

    def raw(self, gguf: str | None, *hf: str) -> Any:
        """Read a value of any kind; None when absent."""
        value = self.lookup(gguf, *hf)[1]
        return None if value is _MISSING else value

    def activation(self, default: Activation) -> Activation:
        """Read the feed-forward activation; GGUF leaves it to the architecture."""
        key, value = self.lookup(
            None, "hidden_activation", "hidden_act", "activation_function", "activation", "mlp_hidden_act"
        )  # a model type has one of them
        if self.is_gguf or value is _MISSING:
            return default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.unsupported(f"{key} is {short(value)}; known are {', '.join(ACTIVATIONS)}", key)
        return ACTIVATIONS[value]

    def has_key(self, hf: str) -> bool:
        """Whether the model type has this key of config.json."""
        return hf in self._family

    def has_tensor(self, tensor: str) -> bool:
        return tensor in self.weights.tensors

    def has_some(self, tensor: str) -> bool:
        """Whether any layer has this tensor: then all that may have it must."""
        return any(name.startswith("blk.") and name.split(".", 2)[2] == tensor for name in self.weights.tensors)

    def vector(self, tensor: str, length: int) -> npt.NDArray[np.float32] | None:
        """Read a small tensor of positive values; None when there is none."""
        info = self.weights.tensors.get(tensor)
        if info is None:
            return None
        if info.shape != (length,):
            raise self.format_error(f"tensor {tensor} has shape {info.shape}; expected ({length},)")
        return self.positive_vector(tensor, self.weights.array(tensor), length)

    def positive_vector(self, name: str, values: Any, length: int) -> npt.NDArray[np.float32]:
        """Check a list of positive factors."""
        try:
            with np.errstate(over="ignore"):
                array = np.asarray(values, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise self.format_error(f"{name} is {short(values)}; expected {length} numbers") from None
        if array.shape != (length,) or not np.all(np.isfinite(array) & (array > 0)):
            raise self.format_error(f"{name} must be {length} positive numbers")
        return array

    def ties_head(self) -> bool:
        """Whether the logits are made with the embedding; GGUF says so by leaving the output matrix out."""
        if self.is_gguf:
            return not self.has_tensor("output.weight")
        if "weight_tying" in self._family and self.raw(None, "weight_tying") is not None:
            return self.flag(None, "weight_tying", default=False)
        return self.flag(None, "tie_word_embeddings", default=False)

    def refuse_unread_keys(self) -> None:
        """Refuse every key that would change the arithmetic and that was not read."""
        unread = [
            key for key, value in self._metadata.items() if key not in self._read_keys and self._matters(key, value)
        ]
        if unread:
            listed = ", ".join(f"{key} = {short(self._metadata[key])}" for key in unread[:8])
            raise self.unsupported(f"the model is changed by {listed}", *unread)

    def _matters(self, key: str, value: object) -> bool:
        if not self.is_gguf:
            is_off = key == "sliding_window" and self._metadata.get("use_sliding_window") is False
            return not is_off and changes_arithmetic(key, value, self.architecture)
        if not key.startswith(f"{self.architecture}."):
            return False
        suffix = key.removeprefix(f"{self.architecture}.")
        is_plain = isinstance(value, int | float | str | None)
        return suffix not in HARMLESS and not (is_plain and value in GGUF_NEUTRAL.get(suffix, ()))

    def format_error(self, message: str) -> FormatError:
        return FormatError(message, file=self.weights.path)

    def unsupported(self, message: str, *fields: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.weights.path}: {message}; this version of Kvarn cannot run it, choose another model", fields=fields
        )

    def _checked(self, key: str, value: Any, hparam: HParam, default: Any, *, is_integer: bool) -> Any:
        if value is _MISSING:
            if default is _MISSING:
                raise self.format_error(f"{key} is missing; the file may be incomplete")
            return default
        kinds: Any = (int, np.integer) if is_integer else (int, float, np.integer, np.floating)
        is_number = isinstance(value, kinds) and not isinstance(value, bool | np.bool_)
        if not is_number or not hparam.low <= value <= hparam.high:  # NaN is in no range
            raise self.format_error(
                f"{key} is {short(value)}; expected a number from {hparam.low:g} to {hparam.high:g}"
            )
        return int(value) if is_integer else float(value)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of config.json, where a model has several parts; about the head the whole has the say."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    shared = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**nested, **shared}
