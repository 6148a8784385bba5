"""The canvas of a diffusion model in the terminal, redrawn after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarn.cli.terminal.text import Writer, printable
from kvarn.tokenizer.canvas import canvas_text

if TYPE_CHECKING:
    from rich.text import Text

    from kvarn.diffusion import CanvasView
    from kvarn.engine.client import EventStream
    from kvarn.tokenizer.tokenizer import Tokenizer
    from kvarn.types import Completion


def watch_canvas(events: EventStream, tokenizer: Tokenizer) -> Completion:
    """Draw the answer while it is denoised, on stderr; at the end the text goes to stdout."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=20) as live:
        for event in events:
            if event.canvas is not None:
                live.update(draw(event.canvas, tokenizer))
            if event.completion is not None:
                completion = event.completion
                break
        else:
            raise AssertionError("a stream ends with a completion")
    writer = Writer()
    writer.write(completion.text)
    writer.end_line()
    return completion


def draw(canvas: CanvasView, tokenizer: Tokenizer) -> Text:
    """Final text plain, the block being denoised in colour, the positions after it dimmed."""
    from rich.text import Text

    ids, start, end = canvas.token_ids, canvas.block_start, canvas.block_end
    parts = ((ids[:start], ""), (ids[start:end], "green"), (ids[end:], "bright_black"))
    drawn = Text()
    for token_ids, style in parts:
        drawn.append(printable(canvas_text(tokenizer, token_ids)), style=style)
    drawn.append(f"\n{canvas.step} steps, {sum(token is not None for token in ids)} of {len(ids)} tokens", style="dim")
    return drawn
