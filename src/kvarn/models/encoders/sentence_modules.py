"""What sentence-transformers wrote beside an encoder's weights: modules.json, the pooling and the dense layers.

Normalize is a step without numbers: the caller says whether vectors are normalised.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kvarn.checks import short
from kvarn.formats.strict_json import read_object, read_optional, read_optional_list
from kvarn.models.encoders.pooled import Classifier, ClassifierActivation, DenseLayer
from kvarn.models.hparams import HParams
from kvarn.models.spec import Encoder, Pooling

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # of GGUF
POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
POOLING_FOLDER = "1_Pooling"
STEPS = ("Transformer", "Pooling", "Dense", "Normalize")
ACTIVATIONS: Mapping[str, ClassifierActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
}
MAX_DENSE = 8


def read_encoder(hparams: HParams, default: Pooling | None) -> Encoder | None:
    """How hidden states become a vector: as the file or the folder says, else by the default; None: no encoder."""
    if hparams.has_tensor("cls.output.weight"):
        return _scoring(hparams)
    folder = hparams.weights.metadata.get("hf_folder")
    if folder is None:
        pooling = read_pooling(hparams, default)
        return None if pooling is None else Encoder(pooling, dense=_gguf_dense(hparams))
    steps = _steps(hparams, folder)
    pooling = _folder_pooling(hparams, folder, is_named="Pooling" in [kind for kind, _ in steps]) or default
    if pooling is None:
        return None
    return Encoder(pooling, dense=_folder_dense(hparams, folder, [path for kind, path in steps if kind == "Dense"]))


def _scoring(hparams: HParams) -> Encoder:
    """A language model whose head has a row for each label instead of each token: it reads the last token's state."""
    hparams.integer("pooling_type", default=0)  # 4, "rank"
    labels = hparams.raw("classifier.output_labels") or []
    info = hparams.weights.tensors["cls.output.weight"]
    names = [str(one).lower() for one in labels] if isinstance(labels, list) else []
    relevant = names.index("yes") if "yes" in names[: info.shape[0]] else info.shape[0] - 1
    has_bias = hparams.has_tensor("cls.output.bias")
    return Encoder("last", Classifier(info.shape[0], dense=False, output_bias=has_bias, relevant=relevant))


def read_pooling(hparams: HParams, default: Pooling | None) -> Pooling | None:
    """Read how hidden states become one vector; 0 in GGUF means: not given."""
    number = hparams.integer("pooling_type", default=0)
    if number == 0:
        return default
    if number not in POOLINGS:
        raise hparams.unsupported(f"pooling_type is {number}; known are 1 mean, 2 cls, 3 last", "pooling_type")
    return POOLINGS[number]


def _steps(hparams: HParams, folder: str) -> list[tuple[str, str]]:
    """The kind and the folder of each step of modules.json; one that is unknown makes other vectors: it is refused."""
    entries = read_optional_list(os.path.join(folder, "modules.json"))
    steps = [(str(entry.get("type")).rpartition(".")[2], str(entry.get("path"))) for entry in entries]
    for number, (kind, path) in enumerate(steps):
        if kind not in STEPS:
            known = ", ".join(STEPS)
            raise hparams.unsupported(f"modules.json has the step {short(kind)}; known are {known}", "modules.json")
        if kind == "Pooling" and path != POOLING_FOLDER:
            raise hparams.format_error(f"modules.json has the pooling in {short(path)}; expected {POOLING_FOLDER}")
        if kind == "Dense" and (path != f"{number}_Dense" or not 2 <= number < 2 + MAX_DENSE):
            raise hparams.format_error(f"modules.json has a dense layer in {short(path)}; expected {number}_Dense")
    kinds = [kind for kind, _ in steps]
    if kinds != sorted(kinds, key=STEPS.index):
        raise hparams.unsupported(f"modules.json has the steps {', '.join(kinds)[:200]} in this order", "modules.json")
    return steps


def _folder_pooling(hparams: HParams, folder: str, *, is_named: bool) -> Pooling | None:
    read = read_object if is_named else read_optional
    config = read(os.path.join(folder, POOLING_FOLDER, "config.json"))
    if not config:
        return None
    if config.get("include_prompt") is False:
        raise hparams.unsupported("pooling that leaves the prompt out (include_prompt) is unknown", "include_prompt")
    chosen = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    chosen += [name for key, name in POOLING_FLAGS.items() if config.get(key) is True]
    unknown = [k for k, v in config.items() if k.startswith("pooling_mode_") and v is True and k not in POOLING_FLAGS]
    chosen = ["last" if name == "lasttoken" else name for name in chosen]
    if unknown or len(chosen) != 1 or chosen[0] not in get_args(Pooling):
        raise hparams.unsupported(f"pooling {unknown or chosen} is unknown; known are mean, cls, last", "pooling_mode")
    pooling: Pooling = chosen[0]
    return pooling


def _folder_dense(hparams: HParams, folder: str, paths: Sequence[str]) -> tuple[DenseLayer, ...]:
    layers = []
    for number, path in enumerate(paths, 2):
        config = read_object(os.path.join(folder, path, "config.json"))
        activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise hparams.unsupported(f"{path} has the activation {short(activation)}; known are {known}", path)
        layers.append(_layer(hparams, number, ACTIVATIONS[activation]))
    return tuple(layers)


def _gguf_dense(hparams: HParams) -> tuple[DenseLayer, ...]:
    for number in (2, 3):  # their sizes are those of the tensors
        for side in ("in", "out"):
            hparams.raw(f"dense_{number}_feat_{side}")
    found = [number for number in range(2, 2 + MAX_DENSE) if hparams.has_tensor(f"dense_{number}.weight")]
    return tuple(_layer(hparams, number, "identity") for number in found)


def _layer(hparams: HParams, number: int, activation: ClassifierActivation) -> DenseLayer:
    info: Any = hparams.weights.tensors.get(f"dense_{number}.weight")
    if info is None or len(info.shape) != 2:
        raise hparams.format_error(
            f"dense_{number}.weight is missing or no matrix; {number}_Dense/model.safetensors has it"
        )
    return DenseLayer(info.shape[0], activation, bias=hparams.has_tensor(f"dense_{number}.bias"))
