"""Measures the built site in Chromium, at two widths, light and dark: `make site`.

Text, lists and tables that are cut, links that lead nowhere, pictures that are not shown, and the
first result of ten searches. Exits with 1 if one of them is not as it should be.
"""

import functools
import http.server
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urljoin

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1280, 390)
# What is typed, and the page that should come first.
SEARCHES = {
    "hang": "guides/when-it-fails",
    "GPU": "faq",
    "install": "index",
    "timeout": "guides/when-it-fails",
    "empty batch": "guides/uneven-data",
    "mask": "guides/sequences",
    "the ranks are in different places": "guides/when-it-fails",
    "deadlock": "guides/when-it-fails",
    "FAQ": "faq",
    "freeze": "guides/recipes",
}
AREAS = {"text": "article, header, footer", "lists": ".bd-sidebar-primary, .bd-sidebar-secondary"}
# Parts of words that run out of the window, or of a box that hides them. What scrolls is not cut.
CUT = """area => {
  const cut = [], words = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
  for (let node; node = words.nextNode();) {
    if (!node.data.trim() || !node.parentElement.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let edge = innerWidth;
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement) {
      const { overflowX } = getComputedStyle(box);
      const scrolls = /auto|scroll/.test(overflowX) && box.scrollWidth > box.clientWidth;
      if (scrolls) { edge = Infinity; break; }
      if (/hidden|clip/.test(overflowX)) edge = Math.min(edge, box.getBoundingClientRect().right);
    }
    const { right, width } = range.getBoundingClientRect();
    if (width > 1 && right > edge + 1) cut.push(node.data.trim());
  }
  return cut;
}"""
WIDE = "boxes => boxes.filter(b => b.checkVisibility() && b.scrollWidth > b.clientWidth + 1).length"
# The beginning of a box's right edge, below the header.
EDGE = """box => {
  box.scrollIntoView({ behavior: 'instant' });
  scrollBy({ top: -120, behavior: 'instant' });
  const { right, top, height } = box.getBoundingClientRect();
  return { x: right - 20, y: top, width: 20, height: Math.min(height, 60) };
}"""
# A picture that did not load, and one whose two variants are both shown, or neither.
PICTURES = """images => {
  const theme = 'only-' + document.documentElement.dataset.theme;
  const fits = i => i.checkVisibility() == i.classList.contains(theme);
  return images.filter(i => i.checkVisibility() && !i.naturalWidth
                            || i.className.includes('only-') && !fits(i)).length;
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _Links(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.links = set[str](), set[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def names_of(site: Path) -> list[str]:
    """The pages; the theme leaves a template in _static."""
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return sorted(name for name in names if not name.startswith("_static"))


def broken_links(site: Path) -> tuple[int, int, list[str]]:
    """Links inside the site, links to other sites, and those inside that lead nowhere."""
    pages = {name: _Links(site / name) for name in names_of(site)}
    inside, outside, broken = 0, 0, []
    for page, found in pages.items():
        for link in found.links:
            if re.match(r"[a-z]+:", link):
                outside += 1
                continue
            inside += 1
            file, _, anchor = urljoin(page, link).partition("#")
            file = unquote(file.partition("?")[0])
            known = file not in pages or not anchor or unquote(anchor) in pages[file].ids
            if not (site / file).exists() or not known:
                broken.append(f"{page}: {link}")
    return inside, outside, broken


def unsigned_tables(page: Page) -> Iterator[str]:
    """Tables that are wider than their box and have no shade at the edge where they are cut."""
    for box in page.query_selector_all(".pst-scrollable-table-container"):
        if not box.evaluate(f"box => ({WIDE})([box])"):
            continue
        edge = box.evaluate(EDGE)
        shown = page.screenshot(clip=edge)
        box.evaluate("box => box.style.setProperty('background', 'none', 'important')")
        if shown == page.screenshot(clip=edge):
            yield " ".join(box.inner_text()[:40].split())


def first_result(page: Page, address: str, words: str) -> str:
    page.goto(f"{address}/search.html?q={quote(words)}")
    done = "document.querySelector('#search-results h2')?.innerText === 'Search Results'"
    page.wait_for_function(done)
    found = page.eval_on_selector_all("ul.search > li > a", "links => links.map(l => l.pathname)")
    return found[0].strip("/").removesuffix(".html") if found else "nothing"


def looks(page: Page, address: str, names: list[str]) -> dict[str, list[str]]:
    """What each page has that it should not have, at each width, light and dark."""
    found: dict[str, list[str]] = {}
    for name in names:
        page.goto(f"{address}/{name}")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                where = f"{name} at {width} px, {scheme}"

                def add(kind: str, what: list[str]) -> None:
                    found.setdefault(kind, []).extend([f"{where}: {what}"] if what else [])  # noqa: B023

                for kind, area in AREAS.items():
                    boxes = page.query_selector_all(area)
                    add(f"pages with cut {kind}", [w for box in boxes for w in box.evaluate(CUT)])
                for table in unsigned_tables(page):
                    add("tables cut without a sign", [table])
                lost = page.eval_on_selector_all(".bd-article img", PICTURES)
                add("pages with a picture missing", [str(lost)] if lost else [])
    return found


def main(site: Path) -> int:
    server = http.server.ThreadingHTTPServer(
        ("localhost", 0), functools.partial(_Quiet, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_port}"
    names = names_of(site)
    inside, outside, broken = broken_links(site)
    with (
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        ) as browser,
    ):
        page = browser.new_page()
        found = looks(page, address, names) | {"broken links": broken}
        results = {words: first_result(page, address, words) for words in SEARCHES}
    print(f"{len(names)} pages, {inside} links inside, {outside} to other sites (not followed)")
    for kind, what in found.items():
        print("\n    ".join([f"{kind}: {len(what)}", *what]))
    for words, result in results.items():
        print(f"search for {words!r}: {result}, wanted: {SEARCHES[words]}")
    return int(any(found.values()) or results != SEARCHES)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
