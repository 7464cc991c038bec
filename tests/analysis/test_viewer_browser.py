"""The viewer's page in a real browser: clicks, keys and sliders show the values that the log holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import planted
import pytest
from browser import CHROMIUM, Browser, change_value, focus, highlighted, set_slider, shown_rates, shown_slots
from msa_analysis.viewer import write_viewer
from test_viewer import EVIL, recorded, small

from msa_lab.runs import Run
from msa_lab.selections import open_selections, selection_rate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        give_up = pytest.fail if os.environ.get("MSA_TEST_BROWSER") == "required" else pytest.skip
        give_up("no Chromium here; install Debian's `chromium`")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


SHIFT = 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two seeds of the same documents, one of others, and one of other blocks."""
    root = tmp_path_factory.mktemp("runs")
    wide = small("wide", model={"block_size": 32})
    return [
        recorded(root, small()),
        recorded(root, small(seed=1), seed=7),
        recorded(root, small("other"), names=("one.py", "three.py")),
        recorded(root, wide),
    ]


@pytest.fixture(scope="module")
def page(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_viewer(runs, tmp_path_factory.mktemp("page") / "viewer.html")


def rate(run: Run, step: int, layer: int, proxy: int, row: int, column: int) -> float:
    data = open_selections(run)
    selected, query = data["selected"].isel(step=step, layer=layer, proxy=proxy).values, data["query"].values
    size = data.attrs["block_size"]
    rates = selection_rate(selected, query, block_size=size, num_blocks=-(-data.attrs["context_length"] // size))
    return float(rates.mean(0)[row, column])


def held_slots(
    run: Run, step: int, document: int, layer: int, proxy: int, query: int
) -> dict[int, tuple[float, float]]:
    at = {"step": step, "document": document, "layer": layer, "proxy": proxy, "query": query}
    data = open_selections(run).isel(at)
    rows = zip(data["selected"].values, data["score"].values, data["mass"].values, strict=True)
    return {int(block): (float(score), float(mass)) for block, score, mass in rows if block >= 0}


def test_it_opens_without_a_complaint_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.complaints == []
    assert set(browser.requests) - {"about:blank"} == {page.resolve().as_uri()}
    assert browser.evaluate("document.querySelectorAll('.thumbnail').length") == 4


def test_a_click_on_a_thumbnail_shows_the_logs_numbers(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.0&query=100&cell=6.2")
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 2, 0, 0, 6, 2), abs=1e-4)
    browser.click('.thumbnail[data-view="0.1.1"]')
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 2, 1, 1, 6, 2), abs=1e-4)
    assert "layer 1, proxy 1" in browser.evaluate("document.querySelector('.view.a .name').textContent")
    assert shown_slots(browser, "a", "a") == held_slots(runs[0], 2, 0, 1, 1, 100)
    assert highlighted(browser, "a") == set(held_slots(runs[0], 2, 0, 1, 1, 100))


def test_the_step_slider_shows_the_record_it_names(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.1.0&query=150&cell=9.4")
    for place, step in enumerate((0, 40, 110)):
        set_slider(browser, "step", place)
        assert browser.evaluate("document.getElementById('step-text').value").startswith(f"{step} of 110")
        assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], place, 1, 0, 9, 4), abs=1e-4)
        assert shown_slots(browser, "a", "a") == held_slots(runs[0], place, 0, 1, 0, 150)


def test_wanted_blocks_that_were_not_chosen_stand_beside(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.1&query=155&text=1")
    data = open_selections(runs[0]).isel(step=2, layer=0, proxy=1, document=1, query=155)
    wanted = dict(zip(data["teacher"].values.tolist(), data["teacher_mass"].values.tolist(), strict=True))
    missed = {block: mass for block, mass in wanted.items() if block not in data["selected"].values}
    assert {block: mass for block, (_, mass) in shown_slots(browser, "a", "missed").items()} == missed
    assert highlighted(browser, "a-wanted") == set(wanted)


def test_every_query_and_document_is_the_logs(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page)
    for document, query in ((0, 0), (1, 17), (0, 79), (1, 159)):
        change_value(browser, "document", document, "change")
        set_slider(browser, "position", query)
        assert shown_slots(browser, "a", "a") == held_slots(runs[0], 2, document, 0, 0, query)
        assert f"token {query} of 160" in browser.evaluate("document.getElementById('position-text').value")


def test_a_click_on_the_map_chooses_its_cell_and_a_query_there(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.0")
    width, height = browser.evaluate(
        "(() => { const c = document.getElementById('map-a'); return [c.clientWidth, c.clientHeight]; })()"
    )
    size = width - 54 - 12
    browser.click("#map-a", ((54 + 0.35 * size) / width, (46 + 0.75 * size) / height))
    assert "cell=7.3" in browser.evaluate("location.hash")
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 2, 0, 0, 7, 3), abs=1e-4)
    assert "in block 7" in browser.evaluate("document.getElementById('position-text').value")


def test_everything_works_from_the_keyboard(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.0&query=100")
    visited = []
    for _ in range(14):
        browser.press("Tab")
        visited.append(browser.evaluate("document.activeElement.id || document.activeElement.className"))
        style = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", f"{visited[-1]} does not show that it has the focus"
    for name in ("play", "step", "thumbnail is-a", "map-a", "document", "position", "fold", "text"):
        assert name in visited, (name, visited)
    browser.evaluate("document.querySelector('.thumbnail.is-a').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    browser.press("Enter", text="\r")
    assert "a=0.1.1" in browser.evaluate("location.hash")
    browser.evaluate("document.getElementById('map-a').focus()")
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
        browser.press(key)
    assert "cell=7.2" in browser.evaluate("location.hash")
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 2, 1, 1, 7, 2), abs=1e-4)
    browser.press("[", text="[")
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 1, 1, 1, 7, 2), abs=1e-4)
    browser.evaluate("document.getElementById('step').focus()")
    browser.press("ArrowLeft")
    assert shown_rates(browser)["a"] == pytest.approx(rate(runs[0], 0, 1, 1, 7, 2), abs=1e-4)
    help_text = browser.evaluate("document.getElementById('help').textContent")
    assert all(key in help_text for key in ("Tab", "Enter", "Home", "Esc", "["))


def test_keys_that_work_anywhere(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.0&query=100&step=1")
    for key, query in ((".", 101), (".", 102), (",", 101)):
        browser.press(key, text=key)
        assert shown_slots(browser, "a", "a") == held_slots(runs[0], 1, 0, 0, 0, query)
    for key, step in (("]", 2), ("[", 1), ("[", 0)):
        browser.press(key, text=key)
        assert shown_slots(browser, "a", "a") == held_slots(runs[0], step, 0, 0, 0, 101)
    browser.press("c", text="c")
    assert shown_slots(browser, "b", "b") == held_slots(runs[0], 0, 0, 0, 1, 101)
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('table-b')") is None


@pytest.mark.parametrize(("key", "modifiers", "text"), [("Enter", SHIFT, "\r"), ("b", 0, "b")])
def test_a_thumbnail_is_set_beside_from_the_keyboard(
    browser: Browser, page: Path, runs: list[Run], key: str, modifiers: int, text: str
) -> None:
    browser.open(page, "#a=0.0.0&query=140")
    browser.evaluate("document.querySelector('.thumbnail.is-a').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    browser.press(key, text=text, modifiers=modifiers)
    assert shown_slots(browser, "a", "a") == held_slots(runs[0], 2, 0, 0, 0, 140)
    assert shown_slots(browser, "b", "b") == held_slots(runs[0], 2, 0, 1, 1, 140)


def test_play_goes_through_the_records_until_it_is_stopped(browser: Browser, page: Path) -> None:
    browser.open(page, "#a=0.0.0&step=0")
    browser.click("#play")
    assert browser.evaluate("document.getElementById('play').getAttribute('aria-pressed')") == "true"
    for step in (1, 2, 0):  # on with the first after the last
        browser.until(f"document.getElementById('step').value == {step}")
    browser.click("#play")
    held = browser.evaluate("document.getElementById('step').value")
    browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
    assert browser.evaluate("document.getElementById('step').value") == held
    assert browser.evaluate("document.getElementById('play').getAttribute('aria-pressed')") == "false"


def test_buttons_keep_the_focus_while_something_changes(browser: Browser, page: Path) -> None:
    browser.open(page, "#a=0.0.0&query=100")
    browser.evaluate("document.querySelector('#buttons button:last-child').focus()")
    for key in (".", "[", "]"):
        browser.press(key, text=key)
        assert focus(browser) == "Compare two runs"
    browser.evaluate("document.querySelector('#buttons button').focus()")
    browser.press("Enter", text="\r")
    assert browser.evaluate("document.querySelectorAll('.view').length") == 2
    assert focus(browser) == "Exchange A and B"
    browser.press("Enter", text="\r")
    assert "a=0.0.1&b=0.0.0" in browser.evaluate("location.hash")
    browser.press("Tab")
    assert focus(browser) == "Leave the comparison"
    browser.press("Enter", text="\r")
    assert browser.evaluate("document.querySelectorAll('.view').length") == 1
    assert focus(browser) == "Compare two proxies"


def test_two_proxies_side_by_side(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.0.0&query=140&cell=8.1")
    browser.click('.thumbnail[data-view="0.1.1"]', modifiers=SHIFT)
    rates = shown_rates(browser)
    assert rates["a"] == pytest.approx(rate(runs[0], 2, 0, 0, 8, 1), abs=1e-4)
    assert rates["b"] == pytest.approx(rate(runs[0], 2, 1, 1, 8, 1), abs=1e-4)
    one, two = held_slots(runs[0], 2, 0, 0, 0, 140), held_slots(runs[0], 2, 0, 1, 1, 140)
    assert (shown_slots(browser, "a", "a"), shown_slots(browser, "b", "b")) == (one, two)
    assert (highlighted(browser, "a"), highlighted(browser, "b")) == (set(one), set(two))
    assert f"have {len(set(one) & set(two))} block" in browser.evaluate("document.getElementById('shared').textContent")
    browser.press("x", text="x")
    assert shown_slots(browser, "a", "a") == two
    browser.press("Escape")
    assert browser.evaluate("document.querySelectorAll('.view').length") == 1


def test_two_runs_of_the_same_documents_side_by_side(browser: Browser, page: Path, runs: list[Run]) -> None:
    browser.open(page, "#a=0.1.0&b=1.1.0&query=133")
    assert browser.evaluate("document.getElementById('apart').hidden")
    assert shown_slots(browser, "a", "a") == held_slots(runs[0], 2, 0, 1, 0, 133)
    assert shown_slots(browser, "b", "b") == held_slots(runs[1], 2, 0, 1, 0, 133)


@pytest.mark.parametrize(
    ("other", "text", "said"), [(2, 1, "different probe documents"), (3, 0, "Blocks of 16 tokens")]
)
def test_runs_whose_queries_differ_are_not_set_side_by_side(
    browser: Browser, page: Path, other: int, text: int, said: str
) -> None:
    browser.open(page, f"#a=0.0.0&b={other}.0.0&text={text}")
    assert said in browser.evaluate("document.getElementById('apart').textContent")
    assert browser.evaluate("document.querySelectorAll('.view').length") == 2
    assert browser.evaluate("document.getElementById('table-b')") is None
    assert browser.complaints == []


def test_the_documents_text_is_shown_as_text(browser: Browser, page: Path) -> None:
    browser.open(page, "#query=159")
    shown = browser.evaluate(
        "[...document.querySelectorAll('#text .block')].map((b) => b.firstChild.textContent).join('')"
    )
    assert shown.startswith(f"{EVIL} & é one.py\n")
    assert browser.evaluate("document.images.length") == 0
    assert browser.complaints == []


def test_unneeded_blocks_fold_away(browser: Browser, page: Path) -> None:
    browser.open(page, "#query=150")
    browser.click("#fold")
    seen = set(
        browser.evaluate("[...document.querySelectorAll('#text .block:not([hidden])')].map((b) => +b.dataset.block)")
    )
    assert seen == highlighted(browser, "a") | highlighted(browser, "a-wanted") | {9}
    assert browser.evaluate("document.querySelectorAll('#text .gap').length") > 0


def test_a_log_without_scores_teacher_or_text_opens(browser: Browser, tmp_path: Path) -> None:
    log = planted.log([planted.newest, planted.oldest], documents=1, context=64).drop_vars("teacher")
    browser.open(write_viewer([log], tmp_path / "viewer.html"), "#query=50")
    assert set(shown_slots(browser, "a", "a")) == {0, 1, 2, 3}
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_zero_impossible_and_unrecorded_cells_look_different(browser: Browser, tmp_path: Path, scheme: str) -> None:
    log = planted.log([planted.newest, planted.newest], documents=1, context=160).isel(query=slice(None, None, 32))
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(write_viewer([log], tmp_path / "viewer.html"), "#query=4")
    pixel = (
        "(([row, column]) => {{ const c = document.querySelector('#map-a'), s = (c.clientWidth - 66) / 10;"
        "const r = c.width / c.clientWidth, at = [54 + (column + .5) * s, 46 + (row + .5) * s].map((v) => v * r);"
        "return [...c.getContext('2d').getImageData(...at, 1, 1).data].join(); }})({})"
    )
    zero, chosen, unknown, future = (browser.evaluate(pixel.format(at)) for at in ("[8,1]", "[8,7]", "[7,3]", "[3,7]"))
    assert len({zero, chosen, unknown, future}) == 4
    browser.call("Emulation.setEmulatedMedia", features=[])
