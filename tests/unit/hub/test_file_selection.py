from __future__ import annotations

import pytest

from kvarn.errors import DownloadError, ModelNotFound
from kvarn.hub.file_selection import SelectedFiles, select_files

QUANTS = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-BF16.gguf", "m-F16.gguf", "README.md"]
SPLIT = [f"Q8_0/m-Q8_0-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
FOLDER = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FOLDER += ["model.safetensors.index.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"]


def select(names: list[str], selector: str | None = None) -> SelectedFiles:
    return select_files(names, selector, "hf:org/repo")


def test_the_only_gguf_is_chosen() -> None:
    assert select(["a/only.gguf", "README.md"]) == SelectedFiles("a/", ("only.gguf",), "only.gguf")


def test_among_several_q4_k_m_is_chosen() -> None:
    assert select(QUANTS).entry == "m-Q4_K_M.gguf"


def test_without_q4_k_m_the_error_lists_the_choices() -> None:
    with pytest.raises(ModelNotFound, match=r"m-F16\.gguf, m-Q8_0\.gguf"):
        select(["m-Q8_0.gguf", "m-F16.gguf"])


@pytest.mark.parametrize(
    ("selector", "entry"), [("q4_k_s", "m-Q4_K_S.gguf"), ("F16", "m-F16.gguf"), ("m-Q8_0.gguf", "m-Q8_0.gguf")]
)
def test_a_quantisation_or_file_selects_exactly_that(selector: str, entry: str) -> None:
    assert select(QUANTS, selector).entry == entry


def test_part_of_a_quantisation_name_selects_nothing() -> None:
    with pytest.raises(ModelNotFound, match="nothing called 'Q4_K'"):
        select(QUANTS, "Q4_K")


def test_a_missing_file_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ModelNotFound, match=r"no file 'x\.gguf'; it has m-BF16\.gguf"):
        select(QUANTS, "x.gguf")


@pytest.mark.parametrize("selector", [None, "Q8_0", SPLIT[1], "m-Q8_0.gguf", "m-Q8_0-00003-of-00003.gguf"])
def test_all_parts_of_a_split_file_are_chosen_and_the_first_is_opened(selector: str | None) -> None:
    files = tuple(name.removeprefix("Q8_0/") for name in SPLIT)
    assert select(SPLIT[::-1], selector) == SelectedFiles("Q8_0/", files, files[0])


def test_a_split_file_with_a_missing_part_is_refused() -> None:
    with pytest.raises(DownloadError, match="part 2 is missing"):
        select([SPLIT[0], SPLIT[2]])


def test_projectors_are_never_chosen_by_themselves() -> None:
    assert select(["mmproj-m-F16.gguf", "m-Q8_0.gguf"]).entry == "m-Q8_0.gguf"


def test_a_safetensors_repository_gives_weights_and_tokeniser_but_no_pickles_or_code() -> None:
    extra = ["pytorch_model.bin", "consolidated.safetensors", "modeling.py", "README.md", "onnx/model.onnx"]
    choice = select(FOLDER + extra)
    assert sorted(choice.files) == sorted(FOLDER)
    assert choice.entry == ""


def test_a_folder_selector_takes_that_folder_only() -> None:
    names = [f"pkg/a/{name}" for name in FOLDER] + [f"pkg/b/{name}" for name in FOLDER]
    choice = select(names, "pkg/b")
    assert choice.folder == "pkg/b/"
    assert sorted(choice.files) == sorted(FOLDER)


def test_several_folders_are_listed_in_the_error() -> None:
    with pytest.raises(ModelNotFound, match="pkg/a, pkg/b"):
        select([f"pkg/{letter}/{name}" for letter in "ab" for name in FOLDER])


def test_the_word_safetensors_chooses_them_beside_a_gguf() -> None:
    assert select([*FOLDER, "m.gguf"], "safetensors").entry == ""
    assert select([*FOLDER, "m.gguf"]).entry == "m.gguf"


def test_a_repository_of_pickles_only_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelNotFound, match="pickles, which Kvarn never loads"):
        select(["config.json", "pytorch_model.bin"])
