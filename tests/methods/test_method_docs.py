"""docs/methods.md and docs/options.md are what their generator makes of the table."""

from __future__ import annotations

import runpy
from pathlib import Path

from mesh_attention.plan.methods.table import METHODS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_of_methods_and_options_are_up_to_date() -> None:
    generator = runpy.run_path(str(DOCS / "make_methods.py"))
    for name, part in generator["parts"]().items():
        page = (DOCS / name).read_text()
        assert page == generator["with_part"](page, part), "python docs/make_methods.py"


def test_the_generator_has_words_for_every_method_and_every_option_and_for_no_other() -> None:
    generator = runpy.run_path(str(DOCS / "make_methods.py"))
    options = {f"`{option}`" for method in METHODS.values() for option in method.options()}
    assert set(generator["VOLUMES"]) == set(METHODS)
    rows = generator["option_rows"]()
    assert {name for name, _, _ in rows} == options
    assert len(rows) == len(options)
    assert all(words for row in rows for words in row)
