"""Markdown as it is drawn: attributes that a sanitizer may take away, large tables, controls that turn text around."""

from __future__ import annotations

import pytest

from tests.page.browser import Tab

RICH = """say: | left | middle | right |
|:-----|:------:|------:|
| a    | b      | 1,024 |

7. seven
8. eight

- [x] ground
- [ ] sifted

$$\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix} = \\sum_{i=1}^{n} \\mathbf{x}_i$$

and $\\vec{v}$ in a line.
"""
LAG = (
    "() => { const at = performance.now(); return new Promise((on) => setTimeout(() => on(performance.now() - at))); }"
)
# Every control of Unicode's bidirectional algorithm.
CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_attributes_that_are_no_addresses_stay(tab: Tab) -> None:
    page = tab.page
    tab.ask(RICH)
    aligned = "all => all.map((one) => getComputedStyle(one).textAlign.replace('-webkit-', ''))"
    assert page.locator(".markdown td").evaluate_all(aligned) == ["left", "center", "right"]
    assert page.locator(".markdown ol").get_attribute("start") == "7"
    boxes = page.locator(".markdown input").evaluate_all(
        "all => all.map((one) => [one.type, one.checked, one.disabled])"
    )
    assert boxes == [["checkbox", True, True], ["checkbox", False, True]]
    assert [box.get_attribute("aria-label") for box in page.locator(".markdown input").all()] == ["done", "to do"]
    page.wait_for_selector(".markdown math")
    displayed, inline = page.locator(".markdown math").all()
    assert displayed.get_attribute("display") == "block"
    assert inline.get_attribute("display") in (None, "inline")
    assert page.locator(".markdown math [stretchy], .markdown math [fence]").count() > 0
    assert tab.violations() == []


def test_a_table_of_thousands_of_rows_is_drawn_in_parts(tab: Tab) -> None:
    page = tab.page
    rows = "\n".join(f"| {number} | row |" for number in range(5_000))
    tab.ask(f"say: | n | text |\n|--:|---|\n{rows}", at_once=True)
    assert page.evaluate(LAG) < 2_000
    assert page.locator(".markdown tbody tr").count() == 100
    page.click("text=Show more of 5,000 rows")
    page.wait_for_function("() => document.querySelectorAll('.markdown tbody tr').length === 1100")
    assert page.evaluate(LAG) < 2_000


@pytest.mark.parametrize(
    "place", ["**{}** bold", "`{}` code", "```\n{}\n```", "| a |\n|---|\n| {} |", "[{}](https://ok.example)"]
)
def test_every_control_that_turns_text_around_is_shown_by_name(tab: Tab, place: str) -> None:
    shown = tab.ask("say: " + place.format(f"x{CONTROLS}y"))
    assert [f"[U+{ord(one):X}]" in shown for one in CONTROLS] == [True] * len(CONTROLS)
    assert not set(CONTROLS) & set(shown)
