"""Pages as a reader meets them, in Debian's Chromium: from file://, light and dark, wide and narrow."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import write_synthetic_run

from flatout.cli.main import main
from flatout.track.run_log import read_run
from flatout.track.summary import ROUTINE_EVENTS
from tests.axe import violations

webdriver = pytest.importorskip("selenium.webdriver")

# boxes of all elements of a selector that are on the page: x, y, width, height
BOXES = """
return [...document.querySelectorAll(arguments[0])].filter((one) => one.checkVisibility())
  .map((one) => { const b = one.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })
"""
# labels of one axis whose boxes overlap, and labels outside the page
OVERLAPS = """
const found = [];
for (const axis of document.querySelectorAll(".plot .x, .plot .y")) {
  if (!axis.checkVisibility()) continue;
  const boxes = [...axis.children].map((one) => one.getBoundingClientRect());
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
    if (a.x < b.right && b.x < a.right && a.y < b.bottom && b.y < a.bottom) found.push(axis.textContent);
  }));
  if (boxes.some((box) => box.x < 0 || box.right > innerWidth)) found.push("outside: " + axis.textContent);
}
return found
"""


@pytest.fixture(scope="module")
def browser(open_chromium):
    driver = open_chromium("--hide-scrollbars")
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, data_set):
    root = tmp_path_factory.mktemp("pages")
    one = write_synthetic_run(root / "one", num_steps=400)
    other = write_synthetic_run(root / "other", num_steps=400, stop_after=250, seed=1, settings={"name": "other"})
    assert main(["report", str(one)]) == 0
    assert main(["report", str(one), str(other), "--out", str(root / "both.html")]) == 0
    return {"one run": one / "report.html", "two runs": root / "both.html", "data set": data_set.page}


def open_page(browser: Any, page: Path, width: int = 1280) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get(page.as_uri())


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


@pytest.mark.parametrize("name", ["one run", "two runs", "data set"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_fits_its_window_and_its_charts_have_marks(browser, pages, name, width):
    open_page(browser, pages[name], width)
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert violations(browser) == []
    # a run's name is not cut into letters
    assert all(box[2] > 110 for box in browser.execute_script(BOXES, "#results tbody th"))
    plots = browser.execute_script(BOXES, ".plot")
    marks = browser.execute_script(BOXES, ".plot svg :is(.line, .area, .bar, .heat)")
    assert len(plots) >= (1 if name == "data set" else 9)
    assert len(marks) >= len(plots)
    assert all(w > 0 or h > 0 for _, _, w, h in marks)
    canvases = browser.execute_script(BOXES, ".canvas")
    assert all(w > 0.6 * plot[2] and h > 150 for (_, _, w, h), plot in zip(canvases, plots, strict=True))
    assert browser.execute_script(OVERLAPS) == []
    for axis in ("step", "tokens", "time") if name != "data set" else ():
        click(browser, f"[data-switch=axis][data-value={axis}]")
        assert browser.execute_script(OVERLAPS) == []


def test_switches_theme_and_filter_work(browser, pages):
    open_page(browser, pages["one run"])
    shown = "return [...document.querySelectorAll('.charts .xname')].filter((x) => x.checkVisibility())"
    for axis, name in (("tokens", "tokens"), ("time", "minutes of training"), ("step", "step")):
        click(browser, f"[data-switch=axis][data-value={axis}]")
        assert set(browser.execute_script(f"{shown}.map((x) => x.textContent)")) == {name}
    charts = browser.execute_script(BOXES, ".charts .plot")
    path = "return document.querySelector('.charts .line').getAttribute('d')"
    linear = browser.execute_script(path)
    click(browser, "[data-switch=scale][data-value=log]")
    assert len(browser.execute_script(BOXES, ".charts .plot")) == len(charts)
    assert browser.execute_script(path) != linear
    colors = []
    for _ in range(3):
        colors.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        click(browser, "#theme")
    assert colors[0] == colors[2] != colors[1]
    click(browser, '[data-kind="skipped"]')
    rows = browser.execute_script("return [...document.querySelectorAll('.events tbody tr')].map((r) => r.hidden)")
    assert rows.count(False) == 1
    assert len(rows) > 5


def test_the_value_under_the_pointer_is_the_records(browser, pages):
    open_page(browser, pages["one run"])
    log = read_run(pages["one run"].parent)
    canvas = browser.find_element("css selector", ".canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    webdriver.ActionChains(browser).move_to_element(canvas).perform()
    lines = browser.find_element("css selector", ".tip").text.split("\n")
    step = int(lines[0].removeprefix("step "))
    assert abs(step - 200) < 3
    assert float(lines[lines.index("training") + 1]) == pytest.approx(log.steps[step - 1].loss, rel=1e-4)
    # the arrow keys go from value to value
    canvas.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert int(browser.find_element("css selector", ".tip b").text.removeprefix("step ")) == step + 1
    browser.execute_script("document.querySelector('#theme').click()")
    assert not browser.find_elements("css selector", ".tip")


def test_a_page_says_what_it_lacks_without_its_script(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(pages["one run"].as_uri())
        assert "drawn by its script" in browser.find_element("css selector", "noscript").text
        assert browser.find_element("css selector", ".chart .legend").text.startswith("training")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_runs_are_rows_that_sort_with_the_best_marked_and_figures_are_saved(browser, pages, tmp_path):
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    open_page(browser, pages["two runs"])
    heads = "return [...document.querySelectorAll('#results thead th')].map((one) => one.textContent)"
    names = "return [...document.querySelectorAll('#results tbody th')].map((one) => one.textContent)"
    cells = "return [...document.querySelectorAll('#results tbody tr')].map((r) => r.cells[arguments[0]].textContent)"
    at = browser.execute_script(heads).index("Evaluation loss")
    orders = []
    for _ in range(2):
        click(browser, f"#results th:nth-child({at + 1}) button")
        losses = [float(one) for one in browser.execute_script(cells, at)]
        orders.append(browser.execute_script(names))
        assert losses == sorted(losses, reverse=len(orders) == 2)
        best = browser.execute_script(
            "return [...document.querySelectorAll('#results .best')].map((one) => one.textContent)"
        )
        assert f"{min(losses):.4f}" in best
    assert orders[0] == orders[1][::-1]
    click(browser, "#results [data-csv]")
    click(browser, ".chart [data-csv]")
    files = [tmp_path / "runs.csv", tmp_path / "loss.csv"]
    for _ in range(600):
        if all(file.exists() and file.stat().st_size for file in files):
            break
        browser.execute_async_script("setTimeout(arguments[0], 100)")
    with files[0].open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0][0] == "Run"
    assert [row[0] for row in table[1:]] == orders[1]
    with files[1].open(newline="") as file:
        points = list(csv.reader(file))
    assert points[0] == ["series", "step", "value"]
    assert len(points) > 100


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_chart_is_saved_as_a_picture(open_chromium, pages, tmp_path, theme):
    """At twice its size, in its colors, with its marks and texts."""
    image = pytest.importorskip("PIL.Image")
    browser = open_chromium("--hide-scrollbars")
    try:
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
        open_page(browser, pages["one run"])
        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        # lines, areas, strips and bars
        kinds = ("Loss", "Step time", "Waiting for the slowest rank", "Sample lengths")
        charts = [browser.execute_script(BOXES, f'figure:has([data-png="{kind}"])')[0] for kind in kinds]
        for kind in kinds:
            click(browser, f'[data-png="{kind}"]')
        files = [tmp_path / (kind.lower().replace(" ", "-") + ".png") for kind in kinds]
        for _ in range(600):
            if all(file.exists() and file.stat().st_size for file in files):
                break
            browser.execute_async_script("setTimeout(arguments[0], 100)")
        assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    finally:
        browser.quit()
    for file, (_, _, width, height) in zip(files, charts, strict=True):
        picture = image.open(file).convert("RGB")
        assert picture.size == (math.ceil(2 * width), math.ceil(2 * height)), file.name
        colors = {color: count for count, color in picture.getcolors(1 << 24)}
        paper = (255, 255, 255) if theme == "light" else (0x1B, 0x1D, 0x21)
        assert picture.getpixel((4, picture.height // 2)) == paper, file.name
        drawn = sum(count for color, count in colors.items() if max(color) - min(color) > 60)
        assert drawn > 200, f"{file.name} has no colored mark"
        ink = (0x1C, 0x1D, 0x20) if theme == "light" else (0xE9, 0xE9, 0xE6)
        assert colors.get(ink, 0) > 20, f"{file.name} has no text"


def test_what_is_routine_is_folded(browser, pages):
    open_page(browser, pages["one run"])
    shown = """
    return [...document.querySelectorAll('.events tbody tr')].filter((row) => row.checkVisibility())
      .map((row) => row.cells[1]?.textContent)
    """
    kinds = set(browser.execute_script(shown))
    assert "skipped" in kinds
    assert kinds.isdisjoint(ROUTINE_EVENTS)
    browser.execute_script("document.querySelectorAll('#events details').forEach((one) => { one.open = true; })")
    assert "saved" in browser.execute_script(shown)
    for link in browser.find_elements("css selector", ".contents a"):
        assert browser.find_element("css selector", link.get_dom_attribute("href")).is_displayed()
