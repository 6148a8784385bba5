"""`kvarn run --watch`: the canvas of a diffusion model on stderr, its answer on stdout."""

from __future__ import annotations

from pathlib import Path

from kvarn.cli.generate.canvas_view import draw
from kvarn.diffusion import CanvasView
from kvarn.formats.open import open_weights
from kvarn.tokenizer import load_tokenizer
from tests.diffusing import write_talking_model
from tests.unit.cli.conftest import Kvarn


def test_the_canvas_shows_what_is_known_and_what_is_masked(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(open_weights(write_talking_model(tmp_path / "tiny.gguf")))
    ids = [*tokenizer.encode("ab"), None, *tokenizer.encode("c"), None]
    drawn = draw(CanvasView(tuple(ids), 2, 4, 7), tokenizer)
    assert drawn.plain == "ab░c░\n7 steps, 3 of 5 tokens"
    assert [str(span.style) for span in drawn.spans if drawn.plain[span.start : span.end] == "░c"] == ["green"]


def test_watching_gives_the_same_answer(kvarn: Kvarn, tmp_path: Path) -> None:
    model = str(write_talking_model(tmp_path / "tiny.gguf"))
    watched = kvarn("run", "-m", model, "--max-tokens", "8", "--watch", "hello")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == kvarn("run", "-m", model, "--max-tokens", "8", "hello").stdout


def test_a_model_that_writes_from_left_to_right_cannot_be_watched(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, "--watch", "hello")
    assert done.returncode == 2
    assert b"diffusion" in done.stderr


def test_options_of_denoising_are_given_by_name(kvarn: Kvarn, tmp_path: Path) -> None:
    model = str(write_talking_model(tmp_path / "tiny.gguf"))
    done = kvarn("run", "-m", model, "-n", "8", "--diffusion", "policy=threshold", "--diffusion", "steps=2", "hello")
    assert done.returncode == 0, done.stderr
    for wrong in ("policy=best", "steps=many", "no_such=1", "steps"):
        done = kvarn("run", "-m", model, "-n", "8", "--diffusion", wrong, "hello")
        assert done.returncode == 2
        assert wrong.partition("=")[0].encode() in done.stderr
