"""The page holds what the facts say, in one file that loads nothing; checked without a browser."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.cli import demo, options
from mesh_attention.cli.main import main
from mesh_attention.cost.pictures import WAIT
from mesh_attention.plan.language.plan import Direction
from mesh_attention.report.estimates import Scaling
from mesh_attention.report.facts import ReportFacts
from mesh_attention.report.page import page_of
from mesh_attention.report.picture import log_axis
from mesh_attention.report.pictures import pictures_of
from support.report_case import HOSTILE

LIBRARY = "/* the library */"


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside of tags with an id or of a kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        results = {name: value or "" for name, value in attributes}
        self.all.append((tag, results))
        self._inside = [tag, *([results["id"]] if "id" in results else [])]

    def handle_endtag(self, tag: str) -> None:
        self._inside = []

    def handle_data(self, data: str) -> None:
        for name in self._inside:
            self.text[name] = self.text.get(name, "") + data

    def find(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.all if name == tag]


@pytest.fixture(scope="session")
def page(report_facts: ReportFacts) -> str:
    return page_of(report_facts, LIBRARY)


@pytest.fixture(scope="session")
def tags(page: str) -> Tags:
    return Tags(page)


@pytest.fixture(scope="session")
def variants(tags: Tags) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads(tags.text["variants"])
    return results


def test_every_part_is_there_and_the_menu_leads_to_it(tags: Tags) -> None:
    parts = [tag["id"] for tag in tags.find("section")]
    assert parts == [
        *("choice", "methods", "assignment", "gantt", "shapes", "scaling", "memory", "notes"),
    ]
    links = [tag["href"].removeprefix("#") for tag in tags.find("a")]
    assert links == parts
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in tags.find(
        "meta"
    )


def test_nothing_is_loaded(tags: Tags, page: str) -> None:
    for _, attributes in tags.all:
        for name in ("src", "href", "action", "poster", "srcset", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attributes)
    style, script = tags.text["style"], tags.text["script"].replace(tags.text["variants"], "")
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"https?:|fetch|import\(|XMLHttpRequest|WebSocket", script)
    (policy,) = (tag["content"] for tag in tags.find("meta") if "http-equiv" in tag)
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert LIBRARY in page


def test_a_hostile_name_of_a_cluster_is_text_and_nothing_else(tags: Tags, page: str) -> None:
    assert HOSTILE in tags.text["title"]
    assert HOSTILE in tags.text["h1"]
    assert tags.find("img") == []
    assert len(tags.find("script")) == 3
    assert "<script>alert" not in page
    assert "onerror=alert(2)>" not in page


def test_every_control_has_its_variants_and_every_variant_a_control(
    tags: Tags, variants: dict[str, dict[str, Any]]
) -> None:
    pictures: dict[str, dict[int, list[str]]] = {}
    picture = control = ""
    for tag, attributes in tags.all:
        if tag == "section":
            picture = attributes.get("data-picture", "")
            if picture:
                pictures[picture] = {}
        if "data-control" in attributes:
            control = attributes["data-control"]
        if tag in ("input", "option"):
            pictures[picture].setdefault(int(control), []).append(attributes["value"])
    assert set(pictures) == set(variants)
    for name, controls in pictures.items():
        values = [controls[at] for at in range(len(controls))]
        assert {"|".join(combination) for combination in product(*values)} == set(variants[name])
    groups: dict[str, int] = {}
    for each in tags.find("input"):
        if each["type"] == "radio":
            groups[each["name"]] = groups.get(each["name"], 0) + ("checked" in each)
    assert set(groups.values()) == {1}


def test_the_script_finds_what_it_looks_for(tags: Tags, page: str) -> None:
    ids = {attributes["id"] for _, attributes in tags.all if "id" in attributes}
    script = tags.text["script"]
    wanted = set(re.findall(r'getElementById\("([\w-]+)"\)', script))
    assert wanted == {"variants", "theme"}
    assert wanted <= ids
    for selector in ("#methods tbody", "#methods thead th"):
        assert selector in script
    for tag in ("tbody", "thead", "figcaption"):
        assert tags.find(tag)
    assert page.count('class="plot ') == page.count("data-picture=")


def test_lines_to_paste_have_a_button_and_every_code_of_the_page_a_legend(
    page: str, report_facts: ReportFacts
) -> None:
    asked = replace(report_facts, command="mesh-attention report --cluster '<b>'")
    for text, buttons in ((page, 1), (page_of(asked, LIBRARY), 2)):
        assert text.count('<button type="button" class="copy">copy</button>') == buttons
    assert "<code>mesh-attention report --cluster &#x27;&lt;b&gt;&#x27;</code>" in text
    codes = re.findall(r"<dt><code>(.*?)</code></dt>", page)
    names = {event.name for chart in report_facts.gantts for event in chart.events}
    kinds = {re.sub(r"\d+", "#", name.partition(".")[0]) for name in names}
    assert kinds <= {re.sub(r"\d+", "#", code) for text in codes for code in text.split(", ")}
    settings = [p.setting for method in report_facts.methods for p in method.passes.values()]
    words = {word.partition("=")[0] for setting in settings for word in setting.split()}
    assert words - {"-"} <= {code.partition("=")[0] for code in codes}


def test_the_methods_that_people_know_are_shown_where_ranks_grow(
    variants: dict[str, dict[str, Any]], report_facts: ReportFacts
) -> None:
    there = {line.name for line in report_facts.scaling}
    for variant in variants["scaling"].values():
        shown = {line["name"] for line in variant["data"] if line.get("visible", True) is True}
        assert {"ulysses", "usp", "ring"} & there <= shown


def test_the_table_can_be_sorted_by_every_column_and_holds_the_facts(
    tags: Tags, report_facts: ReportFacts
) -> None:
    heads = [tag for tag in tags.find("th") if tag.get("scope") == "col"]
    assert {head["aria-sort"] for head in heads} == {"none"}
    buttons = [tag for tag in tags.find("button") if not {"id", "class"} & tag.keys()]
    assert len(buttons) == len(heads) == 10
    names = [tag["data-value"] for tag in tags.find("th") if "data-value" in tag]
    assert names == [method.name for method in report_facts.methods]
    marked = [tag for tag in tags.find("tr") if tag.get("class") == "chosen"]
    assert len(marked) == 1
    cells = [tag["data-value"] for tag in tags.find("td") if "data-value" in tag]
    columns = len(heads) - 1
    assert len(cells) == columns * len(report_facts.methods)
    for at, each in enumerate(report_facts.methods):
        forward, backward = (each.passes[d] for d in Direction)
        row = cells[at * columns : (at + 1) * columns]
        assert [float(value) for value in row[:-1]] == [
            *(forward.seconds, backward.seconds, each.seconds, each.mfu_percent),
            *(forward.received_bytes, backward.received_bytes),
            forward.other_node_bytes + backward.other_node_bytes,
            each.peak_bytes,
        ]


def test_pictures_show_the_numbers_of_the_facts(
    report_facts: ReportFacts, variants: dict[str, dict[str, Any]]
) -> None:
    for chart in report_facts.gantts:
        data = variants["gantt"][f"{chart.name}|{chart.direction}"]["data"]
        drawn = sum(sum(trace["x"]) for trace in data if trace["name"] != WAIT)
        busy = sum(event.end - event.start for event in chart.events)
        assert drawn == pytest.approx(1e3 * busy, rel=1e-3)
    for matrix in report_facts.assignment.matrices:
        for colour, of_rank in (("rank", range(99)), ("node", report_facts.assignment.nodes)):
            key = f"{matrix.direction}|{colour}|{matrix.head}"
            (trace,) = variants["assignment"][key]["data"]
            ranks = [[None if r is None else of_rank[r] for r in row] for row in matrix.ranks]
            assert trace["z"] == ranks
            # Some versions of plotly.js write null where there is no text.
            texts = [["" if r is None else str(r) for r in row] for row in matrix.ranks]
            assert trace["text"] == texts
    for shape in report_facts.shapes:
        (trace,) = variants["shapes"][f"{shape.name}|{shape.direction}"]["data"]
        expected = [
            [t and pytest.approx(1e3 * t.seconds, rel=1e-3) for t in row] for row in shape.times
        ]
        assert trace["z"] == expected
        assert [[bool(x) for x in row] for row in trace["text"]] == [
            [t is not None for t in row] for row in shape.times
        ]
    for line in report_facts.scaling:
        for measure in ("mfu", "time"):
            data = variants["scaling"][f"{line.scaling}|{measure}"]["data"]
            (trace,) = (trace for trace in data if trace["name"] == line.name)
            y = [p.mfu_percent if measure == "mfu" else 1e3 * p.seconds for p in line.points]
            assert trace["y"] == pytest.approx(y, rel=1e-3, abs=1e-3)
            assert trace["x"] == [p.ranks for p in line.points]
    for method in report_facts.methods:
        (trace,) = (t for t in variants["memory"]["both"]["data"] if t["name"] == method.name)
        assert trace["x"] == pytest.approx([1e3 * method.seconds], rel=1e-3)
        assert trace["y"] == pytest.approx([method.peak_bytes / 2**30], abs=1e-4)


def test_what_does_not_fit_into_memory_is_marked(report_facts: ReportFacts) -> None:
    lines = [line for line in report_facts.scaling if line.scaling is Scaling.STRONG]
    peaks = {text.name: text.points[-1].peak_bytes for text in lines}
    last = {text.name: text.points[-1].seconds for text in lines}
    least = min(peaks.values())
    small = replace(report_facts, gpu_bytes=least, methods=report_facts.methods[::-1])
    page = page_of(small, LIBRARY)
    over = [method for method in report_facts.methods if method.peak_bytes > least]
    assert page.count("more than there is") == len(over) > 0
    variant = pictures_of(small)["scaling"].variants["strong|time"]
    for trace in variant.data[:-1]:
        assert trace["marker"]["symbol"][-1].endswith("-open") == (peaks[trace["name"]] > least)
    fits = min((last[name], name) for name, peak in peaks.items() if peak <= least)[1]
    assert f"; 8: {fits}. " in variant.caption
    assert "Open marks need more memory than" in variant.caption
    assert "Open marks" not in pictures_of(report_facts)["scaling"].variants["strong|time"].caption


def test_every_axis_says_what_it_is_and_in_which_unit(variants: dict[str, dict[str, Any]]) -> None:
    for of_picture in variants.values():
        for variant in of_picture.values():
            for side in ("xaxis", "yaxis"):
                assert variant["layout"][side]["title"]["text"]
            assert variant["caption"].endswith(".")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([50.0, 60.0, 240.0], [50, 60, 80, 100, 150, 200]),
        ([0.5, 3.0, 80.0], [0.5, 1, 2, 5, 10, 20, 50]),
        ([0.001, 1000.0], [0.001, 0.01, 0.1, 1, 10, 100, 1000]),
        ([0.0], [1]),
    ],
)
def test_logarithmic_axes_have_a_few_whole_numbers(values: list[float], ticks: list[float]) -> None:
    axis = log_axis("bytes", values)
    assert axis["tickvals"] == ticks
    assert axis["ticktext"] == [f"{tick:g}" for tick in ticks]


def test_the_command_writes_the_page_or_prints_the_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["report", "--ranks", "1", "--tokens", "256", "--heads", "2"]
    words += ["--scaling-ranks", "2", "--pass", "forward", "--layout", "contiguous"]
    assert main([*words, "--output", "page.html"]) == 0
    assert capsys.readouterr().out.endswith("The page is in page.html.\n")
    page = Path("page.html").read_text()
    assert len(page) > 1_000_000  # the library is in it
    assert 'data-picture="gantt"' in page
    assert "Everywhere with layout=contiguous: " in page
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 1
    assert [*facts["chosen"]] == ["forward"]
    assert [*tmp_path.iterdir()] == [tmp_path / "page.html"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "no/such/page.html"], "there is no folder no/such"),
        (["--output", "."], ". is a folder; --output names the page"),
        (["--method", "mesh"], "report compares all methods"),
        ([], "the page is drawn by plotly: pip install 'plotly>=6,<8'"),
    ],
)
def test_what_cannot_be_written_is_told_in_a_line_before_the_search(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("searched first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_best", searched)
    if not words:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert [*tmp_path.iterdir()] == []


def test_the_demonstration_without_plotly_says_why_it_has_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page, line = demo.write_report(tmp_path)
    assert page is None
    assert line.startswith("no page: the page is drawn by plotly: pip install ")
    assert [*tmp_path.iterdir()] == []


def test_a_page_about_a_batch_says_what_its_numbers_are(
    tmp_path: Path, report_cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    line = f"report --ranks 2 --tokens 1k --heads 2 --cluster {report_cluster} --scaling-ranks 2"
    words = [*line.split(), "--pass", "forward", "--output", str(page), "--json"]
    facts: list[dict[str, Any]] = []
    for batch in ("1", "4"):
        assert main([*words, "--batch", batch]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    alone, four = facts
    assert four["gpu_bytes"] == alone["gpu_bytes"] // 4
    assert "4 sequences at a time" in " ".join(four["notes"])
    assert "Batch 4: each sequence has" in page.read_text()
