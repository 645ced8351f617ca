"""The built book in a reader's browser: no other host, no error, nothing missing, a search."""

import re
import shutil
import subprocess
import tarfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from site_scenes import noting_tab, pages_of
from test_chapters import IDENTIFIERS

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.paths import ROOT


class Assets(HTMLParser):
    """Collects what a page loads, what it links to, and its images."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])
        kinds = set((given.get("rel") or "").split())
        if tag == "link" and given.get("href") and kinds & {"stylesheet", "icon"}:
            self.loads.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "img":
            self.images.append(given)


def parsed(page: Path) -> Assets:
    assets = Assets()
    assets.feed(page.read_text())
    return assets


def test_every_page_loads_only_what_lies_beside_it(site):
    for name in pages_of():
        page = site / name
        for source in parsed(page).loads:
            assert not re.match(r"(https?:)?//", source), f"{name} loads {source}"
            if not source.startswith("data:"):
                assert (page.parent / source.split("?")[0].split("#")[0]).exists(), (
                    f"{name} misses {source}"
                )


def test_local_links_lead_somewhere(site):
    text = cache(Path.read_text)
    for page in [*(site / name for name in pages_of()), *(site / "_modules").rglob("*.html")]:
        name = page.relative_to(site)
        for link in parsed(page).links:
            target, _, anchor = link.partition("#")
            if re.match(r"(https?:|mailto:)", link):
                continue
            there = (page.parent / target) if target else page
            assert there.exists(), f"{name} links to {link}"
            if anchor and there.suffix == ".html":
                assert f'id="{anchor}"' in text(there), f"{name} links to {link}"


def test_every_image_is_described(site):
    count = 0
    for name in pages_of():
        for image in parsed(site / name).images:
            if "logo" in (image.get("class") or ""):
                continue
            count += 1
            alt = image.get("alt") or ""
            assert len(alt) > 60 and not alt.endswith((".png", ".svg")), (
                f"{name}: {image.get('src')} says {alt!r}"
            )
    assert count >= 5


def test_progress_lines_and_tracebacks_stay_out_of_the_pages(site):
    for name in pages_of():
        text = (site / name).read_text()
        assert "Traceback" not in text and "about 0 s left" not in text, name
        assert "the last of these" not in text, name  # how progress on a group of points ends


CHAPTER_PAGES = [f"notebooks/{kind.notebook}.html" for kind in CHAPTERS.values()]


def article(page: Path) -> str:
    return re.search(r"<article.*?</article>", page.read_text(), re.S)[0]


@pytest.mark.parametrize("name", CHAPTER_PAGES)
def test_a_chapter_is_short_enough_to_read(site, name):
    text = article(site / name)
    text = re.sub(r"<(script|style|svg|annotation).*?</\1>", " ", text, flags=re.S)
    in_sight = re.sub(r"<details.*?</details>", " ", text, flags=re.S)
    assert in_sight.count("<table") <= 8
    words = re.sub(r"<[^>]*>", " ", text).split()
    assert len(words) <= 9000, f"{name} has {len(words)} words"


def test_what_is_drawn_shows_words_and_no_identifier(site):
    for name in pages_of():
        if "/api" in name or "rerun" in name:
            continue  # pages about the code
        code = r"<(script|style|pre|code|details).*?</\1>"  # folded: parameters, by their names
        text = re.sub(code, " ", article(site / name), flags=re.S)
        seen = re.sub(r"<[^>]*>", " ", text) + " ".join(re.findall(r'alt="([^"]*)"', text))
        assert not IDENTIFIERS.findall(seen), f"{name}: {set(IDENTIFIERS.findall(seen))}"


def test_a_missing_data_file_leaves_no_hole(site):
    for name in pages_of():
        assert "data not here" not in (site / name).read_text(), name


def test_formulas_are_typeset(page, address):
    page.goto(f"{address}/notebooks/01_threat_types.html", wait_until="networkidle")
    page.wait_for_selector("mjx-container", timeout=20_000)


def test_the_search_finds_a_term(page, address):
    page.goto(f"{address}/search.html?q=clip-aware", wait_until="networkidle")
    page.wait_for_selector("#search-results li", timeout=20_000)
    assert "Threat types" in page.locator("#search-results").inner_text()
    assert page.troubles == []


EXPLORERS = {
    "03_counting_privacy": ("T = {} steps", "10,000", "8,000"),
    "10_what_works": ("T = {} rounds", "400", "320"),
}


@pytest.mark.parametrize("chapter", EXPLORERS)
def test_moving_a_slider_of_an_explorer_changes_its_sentence(page, address, chapter):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{address}/notebooks/{chapter}.html", wait_until="networkidle")
    box = page.locator(".privacy-explorer")
    sentence, sliders = box.locator("output"), box.get_by_role("slider")
    words, first, moved = EXPLORERS[chapter]
    said = sentence.inner_text()
    assert words.format(first) in said
    assert sliders.count() == 3 and box.locator("img").count() == 0
    before = box.locator("circle").get_attribute("cy")
    sliders.nth(2).focus()
    page.keyboard.press("ArrowLeft")
    assert sliders.nth(2).get_attribute("aria-valuetext") == moved
    assert sentence.inner_text() not in (said, said.replace(first, moved))
    assert words.format(moved) in sentence.inner_text()
    assert box.locator("circle").get_attribute("cy") != before
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")  # nothing sticks out
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    sheet = "box => getComputedStyle(box.closest('.text_html')).backgroundColor"
    assert box.evaluate(sheet) == "rgba(0, 0, 0, 0)"  # labels are light there: no grey behind them
    assert page.troubles == []


def test_without_scripts_the_explorer_is_a_figure_and_a_sentence(browser, address):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"{address}/notebooks/03_counting_privacy.html")
    box = tab.locator(".privacy-explorer")
    assert box.locator("img").is_visible() and "ε = 0.659" in box.locator("p").inner_text()
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_not_filtered_in_either_theme(page, address, theme):
    page.goto(f"{address}/book/intro.html", wait_until="networkidle")
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    style = page.evaluate("getComputedStyle(document.querySelector('img.dark-light')).filter")
    assert style == "none"


THEME = {
    "label-content-name-mismatch": ("search-button", "theme-switch-button", "sidebar-toggle"),
    "region": ("sidebar-primary-item",),
    "aria-allowed-role": ("doc-biblioentry",),
    "aria-deprecated-role": ("doc-biblioentry",),
    "aria-required-children": ("citation-list",),
}
"""What is not ours: rule of axe → marks of the theme's markup and of the bibliography's."""


def axe_core(folder):
    """Return the source of axe-core, from npm; None where there is no npm, or no network."""
    npm = shutil.which("npm")
    command = [npm, "pack", "--silent", "axe-core@4.14"]
    if not npm or subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        return None
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        return tar.extractfile("package/axe.min.js").read().decode()


AXE = "axe.run(document, {resultTypes: ['violations']})"  # what passes is not worked out
BROKEN = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"


@pytest.fixture(scope="module", params=[(1280, "light"), (390, "dark")], ids=["desk", "phone"])
def visits(request, browser, address, site, tmp_path_factory):
    """Open every page once at a width and in a theme: page → what was seen there."""
    (width, theme), axe = request.param, axe_core(tmp_path_factory.mktemp("axe"))
    seen = {}
    with noting_tab(browser, address) as tab:
        tab.set_viewport_size({"width": width, "height": 900})
        for name in pages_of():
            tab.goto(f"{address}/{name}", wait_until="networkidle")
            tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            seen[name] = {
                "title": tab.locator("h1").first.inner_text(),
                "broken": tab.evaluate(BROKEN),
                "too_wide": tab.evaluate("document.documentElement.scrollWidth - innerWidth"),
                "troubles": tab.troubles.copy(),
            }
            if axe and "/api_" not in name:  # there, autodoc's markup a thousand times over
                tab.evaluate(axe)
                seen[name]["violations"] = tab.evaluate(AXE)["violations"]
                tab.troubles.clear()  # axe warns of what it cannot see
    return seen


def test_a_browser_opens_every_page_without_trouble(visits):
    assert visits
    for name, seen in visits.items():
        assert seen["title"] and seen["troubles"] == [] == seen["broken"], name


def test_no_page_scrolls_sideways(visits):
    for name, seen in visits.items():
        assert seen["too_wide"] <= 0, f"{name} is {seen['too_wide']} px wider than the screen"


def test_nothing_of_ours_shuts_a_reader_out(visits):
    checked = {name: seen["violations"] for name, seen in visits.items() if "violations" in seen}
    if not checked:
        pytest.skip("the accessibility test needs axe-core, which npm brings from the network")
    broken = {}
    for name, rules in checked.items():
        for rule in rules:
            marks = THEME.get(rule["id"], ())
            ours = [
                node["html"] for node in rule["nodes"]
                if not any(mark in node["html"] for mark in marks)
            ]  # fmt: skip
            if ours:
                broken[f"{name}: {rule['id']}"] = ours[:2]
    assert not broken


def test_no_page_names_a_folder_of_the_machine_that_built_it(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.ipynb")]
    assert not [page.name for page in pages if str(ROOT) in page.read_text()]
