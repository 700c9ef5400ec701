"""The documentation names only existing links, files, settings and error messages; its sampling table is the code's."""

import re
from pathlib import Path

import pytest

from docs.generate_settings import PAGE, page
from headrace.sampling import SamplingParameters

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "services").glob("*/README.md"), ROOT / "envoy" / "README.md"]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as git hosts make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked.read_text())):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_has_a_section_twice(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ .+$", text, re.MULTILINE)
    assert sorted(titles) == sorted(set(titles))


def test_the_readme_has_its_sections_and_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_file_that_the_documentation_names_exists():
    pattern = r"`((?:headrace\w*|services|tests|envoy|bench|deploy|docs)/[\w./-]+)`"
    names = {name for path in PAGES for name in re.findall(pattern, path.read_text())}
    folders = [ROOT, *(ROOT / "services").iterdir()]
    assert len(names) > 40
    assert sorted(name for name in names if not any((folder / name).exists() for folder in folders)) == []
    files = {str(path) for folder in ("headrace", "services", "tests") for path in (ROOT / folder).rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", (DOCS / "architecture.md").read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_path_of_a_request_has_at_most_12_steps():
    section = (DOCS / "architecture.md").read_text().split("## The life of a text request")[1].split("\n## ")[0]
    stops = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    assert [int(stop) for stop in stops] == list(range(1, len(stops) + 1))
    assert 8 <= len(stops) <= 12


def test_the_settings_page_is_the_one_that_the_code_generates():
    assert PAGE.read_text() == page()


def test_the_sampling_table_is_the_one_of_the_code():
    rows = ["| parameter | default | meaning |", "|---|---|---|"]
    for name, field in SamplingParameters.model_fields.items():
        default = "" if field.default in (None, "", (), {}) else str(field.default).lower()
        rows.append(f"| `{name}` | {default} | {field.description} |")
    assert "\n".join(rows) in (DOCS / "requests.md").read_text()


def test_every_start_up_message_in_troubleshooting_is_one_of_the_code():
    files = sources()
    table = (DOCS / "troubleshooting.md").read_text().split("| symptom |")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 8
    pieces = [piece.strip(" `") for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if len(piece) > 8 and piece not in files] == []


def sources() -> str:
    """The text of all modules and of the Makefile."""
    paths = [path for folder in ("headrace", "services", "headrace_runner") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in [*paths, ROOT / "Makefile"])
