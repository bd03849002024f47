"""Measures the built site in Chromium, at two widths, light and dark: `make site`.

Text, lists and tables that are cut, links that lead nowhere, pictures that are not shown, and the
first result of each of the SEARCHES. Exits with 1 if one of them is not as it should be.
"""

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import quote, unquote

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1280, 390)
# What is typed, and the page that should come first.
SEARCHES = {
    "hang": "guides/when-it-fails",
    "GPU": "gpus",
    "install": "quick-start",
    "timeout": "guides/when-it-fails",
    "empty batch": "guides/uneven-data",
    "mask": "guides/sequences",
    "the ranks are in different places": "guides/when-it-fails",
    "deadlock": "guides/when-it-fails",
    "FAQ": "faq",
    "freeze": "recipes/freezing",
    "quickstart": "quick-start",
    "gradient accumulation": "guides/gradient-accumulation",
    "multi-node": "guides/multi-node",
    "padding mask": "guides/sequences",
    "uneven inputs": "guides/uneven-data",
    "troubleshooting": "guides/when-it-fails",
    "migrate": "originals/index",
    "bf16": "gpus",
    "docker": "guides/multi-node",
    "tensorboard": "recipes/observing",
    "small batch": "guides/which-batch-norm",
    "benchmark": "speed",
    "max-restarts": "guides/multi-node",
    "key_padding_mask": "guides/sequences",
}
# Words that run out of the window, or of a box that hides them. What scrolls is not cut.
CUT = """areas => areas.flatMap(area => {
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
})"""
# A list beside the page that scrolls sideways is cut: nobody looks for a scroll bar there.
CUT_LISTS = CUT.replace("/auto|scroll/.test(overflowX)", "false")
# The beginning of a table's right edge, below the header, if the table is wider than its box.
EDGE = """box => {
  if (box.scrollWidth <= box.clientWidth + 1) return null;
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
                            || i.className.includes('only-') && !fits(i)).map(i => i.src);
}"""
MEASURES = {  # by kind: which elements, and what of them is wrong
    "pages with cut text": ("article, header, footer", CUT),
    "pages with cut lists": (".bd-sidebar-primary, .bd-sidebar-secondary", CUT_LISTS),
    "pages with a picture missing": (".bd-article img", PICTURES),
}
TABLES = "pages with a table cut without a sign"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def unsigned_tables(page: Page) -> list[str]:
    """Tables that are wider than their box and have no shade at the edge where they are cut."""
    unsigned = []
    for box in page.query_selector_all(".pst-scrollable-table-container"):
        if edge := box.evaluate(EDGE):
            shown = page.screenshot(clip=edge)
            box.evaluate("box => box.style.setProperty('background', 'none', 'important')")
            if page.screenshot(clip=edge) == shown:
                unsigned.append(box.inner_text()[:30])
            box.evaluate("box => box.removeAttribute('style')")
    return unsigned


def first_result(page: Page, address: str, words: str) -> str:
    page.goto(f"{address}/search.html?q={quote(words)}")
    done = "document.querySelector('#search-results h2')?.innerText === 'Search Results'"
    page.wait_for_function(done)
    found = page.eval_on_selector_all("ul.search > li > a", "links => links.map(l => l.pathname)")
    return found[0].strip("/").removesuffix(".html") if found else "nothing"


def broken(links: dict[str, set[str]], ids: dict[str, set[str]], site: Path) -> list[str]:
    """Links inside the site that lead to no file, or to no place of a page."""
    lost = []
    for page, targets in links.items():
        for target in targets:
            file, _, anchor = target.partition("#")
            file = unquote(file.partition("?")[0]) or "index.html"
            known = file not in ids or not anchor or unquote(anchor) in ids[file]
            if not (site / file).is_file() or not known:
                lost.append(f"{page}: {target}")
    return lost


def measure(page: Page, address: str, site: Path) -> dict[str, list[str]]:
    """Everything that is wrong, by its kind."""
    found: dict[str, list[str]] = {kind: [] for kind in (*MEASURES, TABLES)}
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    links, ids = {}, {}
    for name in names:
        if name.startswith("_static"):
            continue  # a template of the theme
        page.goto(f"{address}/{name}")
        hrefs = page.eval_on_selector_all("[href]", "links => links.map(l => l.href)")
        inside = {href for href in hrefs if href.startswith(f"{address}/")}
        links[name] = {href.removeprefix(f"{address}/") for href in inside}
        ids[name] = set(page.eval_on_selector_all("[id]", "places => places.map(p => p.id)"))
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                wrong = {k: page.eval_on_selector_all(*what) for k, what in MEASURES.items()}
                wrong[TABLES] = unsigned_tables(page)
                for kind, what in wrong.items():
                    if what:
                        found[kind].append(f"{name} at {width} px, {scheme}: {what}")
    print(f"{len(links)} pages, {sum(map(len, links.values()))} links inside the site")
    return found | {"broken links": broken(links, ids, site)}


def main(site: Path) -> int:
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_port}"
    with sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        results = {words: first_result(page, address, words) for words in SEARCHES}
        for words, result in results.items():
            print(f"search for {words!r}: {result}; it should be {SEARCHES[words]}")
        found = measure(page, address, site)
    for kind, what in found.items():
        print("\n    ".join([f"{kind}: {len(what)}", *what]))
    return int(any(found.values()) or results != SEARCHES)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
