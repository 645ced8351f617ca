"""The page of claims: its data for every entry, and the filter in a reader's browser."""

import dataclasses
import doctest
import functools
import html
import re
import subprocess
import types

import claim_cells
import claim_files
import claim_rows
import claim_tables
import claims as page_of_claims
import pytest
from docutils import nodes

from fl_privacy_lib.chapters import CHAPTERS, experiment
from fl_privacy_lib.reproduction import verdict
from fl_privacy_lib.reproduction.claims import load_claims
from fl_privacy_lib.reproduction.paths import MEASURED, PUBLISHED, ROOT

IDENTIFIER = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")


@functools.cache
def claims():
    return claim_rows.gather()


@functools.cache
def written():
    return page_of_claims.whole_page()


def visible(text):
    """Return the words of HTML without code, which commands and parts stand in."""
    text = re.sub(r"<code>.*?</code>", "", text, flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", " ", text))


# ---- the data ------------------------------------------------------------------------------------


def test_every_claim_has_an_anchor_of_its_own():
    anchors = re.findall(r'<tr role="row" id="([^"]+)"', written())
    assert anchors == [c.id for c in claims()] and len(set(anchors)) == len(anchors)
    assert sorted(anchors) == sorted(entry["id"] for entry in load_claims())


def test_links_lead_to_anchors_pages_and_records():
    anchors = {c.id for c in claims()}
    links = set(re.findall(r'href="([^"]+)"', written()))
    assert len(links) > 100
    for link in links:
        kind, _, rest = link.removeprefix("../").partition("/")
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif kind == "notebooks":
            assert rest.removesuffix(".html") in {k.notebook for k in CHAPTERS.values()}, link
        else:
            known = ("claims.csv", "cells.csv")
            assert rest in known or (MEASURED / rest.removeprefix("measured/")).exists(), link


def test_every_command_names_what_its_chapter_records():
    tables_of = functools.cache(
        lambda kind: {p.table for p in experiment(kind).parts(kind.of_profile("full"), MEASURED)}
    )
    for claim in claims():
        if "table" in claim.entry:
            words = re.fullmatch(
                r'make record NB=(\d\d) P="--only (\S+)"',
                claim_tables.command(claim.entry["table"]),
            )
            assert words[2] in tables_of(CHAPTERS[words[1]]), claim.id


def test_make_hands_the_part_on():
    command = claim_tables.command("fedsel/table_3").replace('"', "").split(" P=")
    made = subprocess.run([*command[0].split(), "-n", f"P={command[1]}"], cwd=ROOT,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "record 08 --profile full --only fedsel/table_3" in made.stdout


def test_ten_findings_stand_first_each_in_words_for_its_computed_verdict():
    first = [c for c in claims() if "headline" in c.entry]
    assert len(first) == written().count("</p></li>") == 10
    for claim in first:
        assert claim.status in claim.entry["headline"], f"{claim.id} is {claim.status} now"
        assert "{" not in claim.headline()


def test_a_headline_says_the_statement_where_it_has_no_words_for_the_verdict():
    claim = next(c for c in claims() if "headline" in c.entry)
    other = claim_rows.Claim(claim.entry | {"headline": {"not run": "?"}}, claim.verdict, (), ())
    assert other.headline() == claim.entry["statement"]


def test_no_code_name_is_in_the_visible_text():
    found = set(IDENTIFIER.findall(visible(written())))
    assert not found, sorted(found)
    lines = claim_files.cells_csv(claims()).splitlines()[1:]
    assert not {n for line in lines for n in IDENTIFIER.findall(line.split(",", 1)[1])}


def test_no_sentence_of_an_entry_is_longer_than_35_words():
    for claim in claims():
        lines = (claim.entry["statement"], *claim.tests, claim.why, claim.headline() or "")
        for line in (*lines, *claim.more):
            for sentence in re.split(r"(?<=[.!?])\s+", line):
                assert len(sentence.split()) <= 35, (claim.id, sentence)


def test_the_cell_in_sight_is_the_one_farthest_off():
    """Against a loop over the outcomes."""
    claim = next(c for c in claims() if c.id == "fed_alpha_cdp.table_6")
    gaps = [abs(o.gap) / float(o.cell["value"]) for o in claim.verdict.outcomes if not o.held]
    assert claim.worst.held is False and claim.size == pytest.approx(max(gaps))
    assert (claim.published, claim.measured) == ("0.147", "0.207") and claim.seeds == "exact"
    low, high = min(o.gap for o in claim.verdict.outcomes), max(gaps)
    assert low < 0 and claim.deviation.endswith(f"+{100 * high:.1f} %")


def test_a_refuted_claim_shows_its_strongest_counter_example():
    claim = next(c for c in claims() if c.id == "fed_cdp.billboard")
    strongest = max(claim.verdict.outcomes, key=lambda o: o.gap).cell
    quantity, asked = claim.published.split(": ")
    assert quantity == "ε" and float(asked) == pytest.approx(strongest["claimed"], abs=1e-3)
    assert claim.worst.found == pytest.approx(strongest["claimed"] + strongest["excess"])
    taken_along = claim_files.cells_csv([claim]).splitlines()[1:]
    assert all(line.endswith(",counter-example") for line in taken_along)  # not that it holds


def test_the_grid_has_every_published_table_and_every_value_once():
    rows = claim_tables.matrix(claims())
    files = {folder.name: len(list(folder.glob("table_*.csv"))) for folder in PUBLISHED.iterdir()
             if folder.is_dir()}  # fmt: skip
    assert {paper: len(tables) for paper, tables in rows.items()} == files
    assert sum(t.printed for tables in rows.values() for t in tables) == 1936
    for table in (t for tables in rows.values() for t in tables):
        assert table.come_out + table.exceeded <= table.at_setting <= table.measured
        assert bool(table.claim) or not table.measured, table
        assert table.grade[0] == "A" if table.come_out == table.at_setting > 0 else True


def test_the_files_have_a_line_for_each_claim_and_cell():
    assert claim_files.claims_csv(claims()).count("\n") >= len(claims()) + 1
    cells = claim_files.cells_csv(claims())
    assert cells.count("\n") == sum(c.verdict.cells for c in claims()) + 1


def test_numbers_are_plain():
    assert doctest.testmod(claim_cells).failed == 0
    assert claim_cells.span([-0.668, -0.271], "") == "−0.67 to −0.27"
    assert claim_cells.span([0.0, 1e-15], " %") == "0 %"


def test_a_claim_leads_to_the_section_that_the_ledger_names(monkeypatch):
    toc = nodes.bullet_list()
    for anchor, title in (("", "1. A chapter"), ("#first", "First"), ("#reach", "Can it reach ε?")):
        toc += nodes.reference("", title, anchorname=anchor)
    page = CHAPTERS["01"].notebook
    app = types.SimpleNamespace(env=types.SimpleNamespace(tocs={f"notebooks/{page}": toc}))
    warned = []
    monkeypatch.setattr(
        page_of_claims.logging, "getLogger",
        lambda _: types.SimpleNamespace(warning=lambda *words: warned.append(words)),
    )  # fmt: skip
    argued, claim = page_of_claims.argued_in(app), next(c for c in claims() if "table_7" in c.id)

    def leads(**changes):
        return argued(dataclasses.replace(claim, entry=claim.entry | changes))

    assert leads(section="Can it reach ε?") == (f"../notebooks/{page}.html#reach",
                                                "chapter 1: Can it reach ε?")  # fmt: skip
    assert leads(section=None) == (f"../notebooks/{page}.html", "chapter 1") and not warned
    assert leads(section="Gone") == (f"../notebooks/{page}.html", "chapter 1")
    assert len(warned) == 1 and "Gone" in warned[0]


def test_the_findings_that_stand_first_lead_to_a_section():
    for claim in (c for c in claims() if "headline" in c.entry):
        assert claim.entry["section"], claim.id


# ---- the browser ---------------------------------------------------------------------------------


@pytest.fixture
def listed(page, address):
    page.goto(f"{address}/book/claims.html", wait_until="networkidle")
    return page


def shown(tab):
    return tab.locator("table.claim-list tbody tr:visible").count()


def count(tab):
    return tab.locator("#claim-count").inner_text()


def test_the_filter_shows_what_matches_and_says_how_many(listed):
    total = len(claims())
    assert shown(listed) == total and count(listed) == f"{total} of {total} claims"
    for name, value, matching in (
        ("status", "refuted", [c for c in claims() if c.status is verdict.Status.REFUTED]),
        ("paper", "FedSel", [c for c in claims() if c.paper == "FedSel"]),
        ("chapter", "3", [c for c in claims() if c.entry["chapter"] == "03"]),
        ("data", "LFW", [c for c in claims() if "LFW" in c.data]),
    ):
        listed.locator(f"#claim-filter select[name={name}]").select_option(value)
        assert shown(listed) == len(matching) > 0
        assert count(listed) == f"{len(matching)} of {total} claims"
        listed.locator("#claim-filter button[type=reset]").click()
        listed.wait_for_function("!document.querySelector('table.claim-list tr[hidden]')")
    assert listed.troubles == []


def test_words_are_searched_in_the_whole_entry(listed):
    listed.get_by_label("Words").fill("Billboard lemma")
    assert shown(listed) >= 1 and listed.locator("[id='fed_cdp.billboard']").is_visible()
    listed.get_by_label("Words").fill("no such words anywhere")
    assert shown(listed) == 0 and count(listed).startswith("0 of ")


def test_columns_sort_by_key_both_ways(listed):
    button = listed.get_by_role("button", name="Deviation")
    keys = "els => els.map(e => Number(e.cells[4].dataset.key))"
    rows = listed.locator("table.claim-list tbody tr")
    button.focus()
    listed.keyboard.press("Enter")
    first = rows.evaluate_all(keys)
    assert first == sorted(first)
    assert button.locator("xpath=..").get_attribute("aria-sort") == "ascending"
    listed.keyboard.press("Enter")
    assert rows.evaluate_all(keys) == first[::-1] or rows.evaluate_all(keys) == sorted(first)[::-1]
    assert button.locator("xpath=..").get_attribute("aria-sort") == "descending"


def test_a_link_to_a_hidden_claim_shows_it(listed, address):
    listed.goto(f"{address}/book/claims.html?status=refuted", wait_until="networkidle")
    assert 0 < shown(listed) < len(claims())
    listed.evaluate("location.hash = 'fed_cdp.table_6'")
    listed.wait_for_selector("[id='fed_cdp.table_6']:visible")
    assert shown(listed) == len(claims())


def test_a_headline_leads_to_its_section(listed):
    """The section, not only the chapter: its anchor is in the page."""
    links = listed.locator(".claim-headlines a[href*='notebooks']")
    assert links.count() == 10
    for href in links.evaluate_all("els => els.map(e => e.href)"):
        name, _, anchor = href.partition("#")
        listed.goto(name, wait_until="domcontentloaded")
        assert anchor and listed.locator(f"[id='{anchor}']").count(), href


def test_the_page_is_whole_without_scripts(browser, address):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 800})
    tab = context.new_page()
    tab.goto(f"{address}/book/claims.html")
    assert tab.locator("table.claim-list tbody tr").count() == len(claims())
    assert not tab.locator("#claim-filter").is_visible()
    context.close()


def test_no_page_of_claims_scrolls_sideways_on_a_phone(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    tab = context.new_page()
    for name in ("claims", "changes"):
        tab.goto(f"{address}/book/{name}.html", wait_until="networkidle")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.evaluate(wide) == 0, name
    context.close()


def test_the_downloads_are_there(listed):
    links = listed.locator("a[download]").evaluate_all("els => [...new Set(els.map(e => e.href))]")
    assert len(links) > 30
    for link in links:
        assert listed.request.get(link).ok, link
