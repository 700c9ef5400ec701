"""Writes the tables of families into docs/models.md from the tests' zoos: `python -m docs.generate_models`."""

from pathlib import Path

from tests.model.random_crowd import PROMPTS
from tests.random_encoders import FAMILIES as ENCODERS
from tests.random_encoders import TEXTS, Encoder
from tests.zoo import FAMILIES, Family

PAGE = Path(__file__).with_name("models.md")


def page() -> str:
    """The whole page, with the tables of today's zoos."""
    generation = _table("family", "`model_type`", "runner", "equal to `generate`", *map(_row, FAMILIES))
    columns = ("vectors", "scores of a classifier", "scores by `LogitScore`")
    encoders = _table("family", "`model_type`", *columns, *map(_encoder_row, ENCODERS))
    text = PAGE.read_text()
    for name, table in (("families", generation), ("encoders", encoders)):
        begin, end = f"<!-- {name}: written by docs/generate_models.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text


def _table(*cells_and_rows: str) -> str:
    cells = [cell for cell in cells_and_rows if not cell.endswith("\n")]
    return f"\n| {' | '.join(cells)} |\n|{'---|' * len(cells)}\n{''.join(cells_and_rows[len(cells) :])}\n"


def _row(family: Family) -> str:
    name = f"| {family.name} | `{family.model_type}` |"
    if family.fault:
        return f"{name} | no: {family.fault} |\n"
    if not family.is_served:
        return f"{name} refused | {family.outcome} |\n"
    runner = f"`{family.outcome}`{family.reason and ': '}{family.reason}"
    return f"{name} {runner} | {len(PROMPTS)} of {len(PROMPTS)} |\n"


def _encoder_row(family: Encoder) -> str:
    equal = f"{len(TEXTS)} of {len(TEXTS)}"
    outcomes = (family.vectors, family.scores, family.logits)
    cells = [f"refused: {one}" if isinstance(one, str) else equal if one else "" for one in outcomes]
    return f"| {family.name} | `{family.model_type}` | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
