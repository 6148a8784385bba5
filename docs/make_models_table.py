"""Write the table of docs/models.md from the registry of architectures: `python docs/make_models_table.py`.

A test fails when the page does not have what this writes.
"""

from __future__ import annotations

from pathlib import Path

from kvarn.models.registry import supported_families

TARGET = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- table: make_models_table.py -->", "<!-- end of the table -->"


def render() -> str:
    """The whole page, with the table as the registry has it."""
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    heading = "| family | GGUF `general.architecture` | folder `model_type` | context by default | tested against |"
    lines = [heading, "|---|---|---|---|---|"]
    for title, gguf, hf, context, oracle in supported_families():
        lines.append(f"| {title} | {_code(gguf)} | {_code(hf)} | {context or 'as the file says'} | {oracle} |")
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else "none"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
