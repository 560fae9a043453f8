"""The page in a browser: a click on each control, light and dark, on a laptop and on a phone.

    make test-browser

With `--screenshots FOLDER` what was seen is kept there as PNG files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_attention.report.facts import ReportFacts
from mesh_attention.report.page import page_of, plotly_js
from support.browser import Browser
from support.report_case import HOSTILE

pytestmark = pytest.mark.browser
SIZES = {"laptop": (1366, 768, False), "phone": (390, 844, True)}


@pytest.fixture(scope="session")
def page(report_facts: ReportFacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(report_facts, plotly_js()), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=SIZES)
def window(request: pytest.FixtureRequest) -> Iterator[Browser]:
    width, height, touch = SIZES[request.param]
    opened = Browser(width, height, touch=touch)
    yield opened
    opened.close()


@pytest.fixture
def browser(window: Browser, page: Path) -> Iterator[Browser]:
    window.open(page)
    yield window
    assert window.log() == []  # nothing went wrong, and nothing was refused by the policy
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def sections(browser: Browser) -> list[Any]:
    elements = browser.find("[data-picture]")
    assert len(elements) == 5
    return elements


def caption(browser: Browser, section: Any) -> str:
    text: str = browser.run("return arguments[0].querySelector('figcaption').textContent", section)
    return text


def test_every_picture_is_drawn_and_nothing_of_a_hostile_name_ran(browser: Browser) -> None:
    for section in sections(browser):
        shown = browser.run(
            "const box = arguments[0].querySelector('.plot svg.main-svg').getBoundingClientRect();"
            "return [box.width, box.height]",
            section,
        )
        assert min(shown) > 200
        texts = browser.run(
            "return [...arguments[0].querySelectorAll('svg text')].map(one => one.textContent)",
            section,
        )
        assert not {"null", "NaN", "undefined"} & {*texts}
    assert HOSTILE in browser.run("return document.querySelector('h1').textContent")
    assert browser.run("return document.images.length") == 0


def test_a_click_on_each_choice_draws_what_was_chosen(browser: Browser) -> None:
    for section in sections(browser):
        variants = browser.run(
            "return JSON.parse(document.getElementById('variants').textContent)"
            "[arguments[0].dataset.picture]",
            section,
        )
        seen = {caption(browser, section)}
        radios = browser.run(
            "return [...arguments[0].querySelectorAll('input[type=radio]')]", section
        )
        options = browser.run("return [...arguments[0].querySelectorAll('option')]", section)
        assert radios or options
        for each in [*radios, *options]:
            browser.click(each)
            chosen = browser.run("return arguments[0].checked || arguments[0].selected", each)
            assert chosen
            key = browser.run(
                "return [...arguments[0].querySelectorAll('[data-control]')]"
                ".filter((c) => c.type !== 'radio' || c.checked).map((c) => c.value).join('|')",
                section,
            )
            assert caption(browser, section) == variants[key]["caption"]
            drawn = browser.run("return arguments[0].querySelector('.plot').data.length", section)
            assert drawn == len(variants[key]["data"])
            seen.add(caption(browser, section))
        assert len(seen) > 1


def test_the_button_changes_to_dark_and_back_with_the_pictures(browser: Browser) -> None:
    (button,) = browser.find("#theme")
    colours = """
    const plot = document.querySelector(".plot");
    return [getComputedStyle(document.body).backgroundColor, plot.layout.font.color];
    """
    light = browser.run(colours)
    browser.click(button)
    dark = browser.run(colours)
    assert light[0] == "rgb(255, 255, 255)"
    assert all(first != other for first, other in zip(light, dark, strict=True))
    assert browser.run("return arguments[0].getAttribute('aria-pressed')", button) == "true"
    browser.click(button)
    assert browser.run(colours) == light


def test_each_heading_sorts_by_a_click_and_by_a_key(browser: Browser) -> None:
    order = "return [...document.querySelectorAll('#methods tbody tr')].map((r) => r.cells[%d]"
    for column, head in enumerate(browser.find("#methods thead th")):
        (button,) = browser.run("return [arguments[0].querySelector('button')]", head)
        sorts = "return arguments[0].getAttribute('aria-sort')"
        browser.click(button)
        assert browser.run(sorts, head) == "ascending"
        up = browser.run(order % column + ".dataset.value)")
        browser.press(button, "\ue007")  # the key Enter
        assert browser.run(sorts, head) == "descending"
        down = browser.run(order % column + ".dataset.value)")
        if column in (0, 9):
            assert sorted(up) == up
        else:
            assert sorted(map(float, up)) == [*map(float, up)]
        assert down[0] == up[-1]
        others = browser.run(
            "return document.querySelectorAll('#methods thead [aria-sort=none]').length"
        )
        assert others == 9


def test_a_name_in_the_legend_shows_its_line(browser: Browser) -> None:
    (section,) = browser.find("#scaling")
    hidden = """
    const plot = arguments[0].querySelector(".plot");
    return plot.data.filter((line) => line.visible === "legendonly").length;
    """
    before = browser.run(hidden, section)
    names = browser.run("return [...arguments[0].querySelectorAll('.legendtoggle')]", section)
    browser.click(names[0])
    end = time.monotonic() + 20  # a click waits for a second one, which would show it alone
    while browser.run(hidden, section) == before:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert browser.run(hidden, section) == before + 1


def test_the_page_never_scrolls_sideways_and_focus_can_be_seen(browser: Browser) -> None:
    width = browser.run("return document.documentElement.scrollWidth")
    assert width == browser.width
    wide = browser.run(
        "return [...document.querySelectorAll('main *')].filter((e) => !e.closest('.wide') && "
        "!e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    (button,) = browser.run("return [document.querySelector('#methods thead button')]")
    browser.press(button, "\ue004\ue008\ue004")  # Tab and back: as someone with a keyboard
    outline = browser.run("return getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_follows_the_system_and_can_be_kept_as_a_picture(
    size: str, dark: bool, page: Path, request: pytest.FixtureRequest
) -> None:
    width, height, touch = SIZES[size]
    browser = Browser(width, height, dark=dark, touch=touch)
    try:
        browser.open(page)
        text = browser.run("return getComputedStyle(document.body).color")
        assert text == ("rgb(230, 234, 239)" if dark else "rgb(27, 31, 36)")
        folder = request.config.getoption("--screenshots")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            browser.screenshot(Path(folder) / f"{size}-{'dark' if dark else 'light'}.png")
    finally:
        browser.close()
