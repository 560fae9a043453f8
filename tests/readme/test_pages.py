"""Pages are short, are on the site, link to what exists, and have headings that answer what a new
user asks. `make docs` also checks anchors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import mesh_attention

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MOST_WORDS = 1500


@pytest.mark.parametrize("page", WRITTEN, ids=[page.name for page in WRITTEN])
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    if page.name != "api.md":
        assert len(text.split()) <= MOST_WORDS
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_on_the_site_and_every_entry_is_a_page() -> None:
    navigation = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == [page.name for page in PAGES]


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    names = set(mesh_attention.__all__) - {"__version__"}
    assert sorted(name for name in names if f"[`{name}`](#mesh_attention." not in page) == []


QUESTIONS = tomllib.loads((DOCS / "questions.toml").read_text())


def test_every_page_has_three_questions_and_the_headings_that_answer_them() -> None:
    assert QUESTIONS.keys() == {page.stem for page in PAGES} | {"README"}
    for name, questions in QUESTIONS.items():
        page = ROOT / "README.md" if name == "README" else DOCS / f"{name}.md"
        headings = re.findall(r"^#{2,} (.*)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", x).strip().lower().replace(" ", "-") for x in headings}
        assert len(questions) == 3, name
        assert {*questions.values()} <= anchors | {""}, name
