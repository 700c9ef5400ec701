"""Writes the table of families into docs/models.md from the tests' zoo: `python -m docs.generate_models`."""

from __future__ import annotations

from pathlib import Path

from tests.model.random_crowd import PROMPTS
from tests.zoo import FAMILIES, Family

PAGE = Path(__file__).with_name("models.md")
_BEGIN, _END = "<!-- families: written by docs/generate_models.py -->\n", "<!-- end of families -->"


def page() -> str:
    """The whole page, with the table of today's zoo."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    rows = "".join(map(_row, FAMILIES))
    table = f"\n| family | `model_type` | runner | equal to `generate` |\n|---|---|---|---|\n{rows}\n"
    return before + _BEGIN + table + _END + rest.partition(_END)[2]


def _row(family: Family) -> str:
    name = f"| {family.name} | `{family.model_type}` |"
    if family.fault:
        return f"{name} | no: {family.fault} |\n"
    if not family.is_served:
        return f"{name} refused | {family.outcome} |\n"
    return f"{name} `{family.outcome}` | {len(PROMPTS)} of {len(PROMPTS)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
