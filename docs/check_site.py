"""Reads the built site: every link and anchor exists, and nothing is loaded from elsewhere.

    python docs/check_site.py site

`mkdocs build --strict` checks what pages say; this checks what theme and reference make of it.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}  # the page itself
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        target = values.get(LOADED.get(tag, ""))
        if target is not None and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(target)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


def faults(folder: Path) -> list[str]:
    pages = {file.resolve(): Page(file.read_text()) for file in folder.rglob("*.html")}
    pages.pop((folder / "404.html").resolve(), None)  # its links are those of a server's root
    complaints = [] if pages else [f"{folder} has no pages"]
    for file, page in pages.items():
        for target in page.loaded:
            if urlsplit(target).scheme in ("http", "https") or target.startswith("//"):
                complaints.append(f"{file.name} loads {target}")
        for target in (*page.links, *page.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            place = place / "index.html" if place.is_dir() else place
            if not place.exists():
                complaints.append(f"{file.name} links to {target}, which is not there")
            elif place in pages and unquote(parts.fragment or "") not in pages[place].anchors:
                complaints.append(f"{file.name} links to {target}, which has no such anchor")
    for file in folder.rglob("*.css"):
        if "url(http" in file.read_text() or "@import" in file.read_text():
            complaints.append(f"{file.name} loads a file from elsewhere")
    return complaints


def main(arguments: list[str]) -> int:
    (folder,) = arguments
    complaints = faults(Path(folder))
    pages = len(list(Path(folder).rglob("*.html")))
    print("\n".join(complaints) or f"{pages} pages, all links are there: {folder}/index.html")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
