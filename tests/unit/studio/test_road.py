"""Studio in a browser: data, plan, training, watching, comparing, chat, on a tiny model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.track.run_log import read_run
from tests.axe import violations
from tests.conftest import Tiny
from tests.studio_client import CHOSEN, shows_default

pytest.importorskip("selenium")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

# for a machine ten times slower
LIMIT_S = 600
# a folder for screenshots; empty: none are taken
SHOTS = os.environ.get("FLATOUT_SHOTS", "")
# elements that reach over the page's right edge, and that nothing around them scrolls or cuts
OUTSIDE = """
const cuts = (one) => one && (getComputedStyle(one).overflowX !== "visible" || cuts(one.parentElement));
return [...document.querySelectorAll("body *")]
  .filter((one) => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1)
  .filter((one) => !cuts(one.parentElement))
  .map((one) => `${one.tagName}.${one.className} ends at ${Math.round(one.getBoundingClientRect().right)}`)
"""


@pytest.fixture
def browser(open_chromium):
    driver = open_chromium("--window-size=1280,1000")
    yield driver
    driver.quit()


@pytest.fixture
def studio(tiny, tmp_path):
    """The address of `flatout studio` in a fresh folder that holds the tiny model."""
    shutil.copytree(tiny.model_dir, tmp_path / "tiny-model")
    with subprocess.Popen(
        [sys.executable, "-m", "flatout", "studio", "--port", "0", "--no-browser"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        yield lines[1], tmp_path
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


class Page:
    """A browser as a person uses it: by labels and what is visible."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.errors: list[Any] = []

    def find(self, selector: str) -> Any:
        """Wait for the first visible element."""
        return self.until(lambda: next((one for one in self.all(selector) if one.is_displayed()), None), selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def until(self, condition: Any, what: str) -> Any:
        """Wait until `condition` is true; a page may be replaced meanwhile."""
        from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
        from selenium.webdriver.support.wait import WebDriverWait

        wait = WebDriverWait(self.driver, LIMIT_S, 0.1, ignored_exceptions=[StaleElementReferenceException])
        try:
            return wait.until(lambda _: condition())
        except TimeoutException:
            pytest.fail(f"waited for {what}; the page says: {self.text('body')}")

    def text(self, selector: str) -> str:
        return " ".join(one.text for one in self.all(selector))

    def fill(self, selector: str, value: str) -> None:
        field = self.find(selector)
        if field.tag_name == "select":
            self.driver.execute_script(
                "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}));"
                "arguments[0].dispatchEvent(new Event('change', {bubbles: true}))",
                field,
                value,
            )
        else:
            field.clear()
            field.send_keys(value)

    def shoot(self, name: str) -> None:
        """Check the console, and accessibility and overflow on a phone; take screenshots if they are asked for."""
        self.errors += [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        phone = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        assert self.driver.execute_script(OUTSIDE) == [], f"{name}: wider than 400 px"
        assert violations(self.driver) == [], name
        for width, theme in [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")] if SHOTS else []:
            self.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
            )
            self.driver.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
            height = self.driver.execute_script("return document.documentElement.scrollHeight")
            assert self.driver.execute_script("return document.documentElement.scrollWidth") <= width, name
            self.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": min(height, 4000), "deviceScaleFactor": 1, "mobile": width < 500},
            )
            self.driver.save_screenshot(str(Path(SHOTS, f"{name}-{width}-{theme}.png")))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_whole_road_runs_in_a_browser(browser, studio, tiny):
    address, workspace = studio
    page = Page(browser)
    browser.get(address)
    page.find("#build")
    assert "token" not in browser.current_url
    build_data(page, tiny)
    plan_a_run(page)
    watch_stop_and_resume(page, workspace / "runs" / "first")
    take_it_away(page, workspace / "runs" / "first")
    ask_both_models(page)
    compare_two_runs(page, workspace / "runs")
    name_and_note(page, workspace / "runs" / "first")
    start_from_and_delete(page, workspace / "runs" / "second")
    assert not page.errors


def build_data(page: Page, tiny: Tiny) -> None:
    """Upload, build, and look at the mask."""
    page.driver.find_element("id", "upload").send_keys(str(tiny.chats))
    page.until(lambda: "uploaded uploads/chats.jsonl" in page.text("#upload-status"), "the upload")
    assert page.find("[name='data.name']").get_property("value") == "chats"
    assert page.find("[name='model.name']").get_property("value") == "tiny-model"
    page.shoot("data-empty")
    page.find("#build [type=submit]").click()
    assert page.find("#samples-body .t").text
    page.until(lambda: "of 120" in page.text("#samples-status"), "the number of samples")
    page.shoot("data")


def plan_a_run(page: Page) -> None:
    """The figures follow the settings, and a wrong setting is named."""
    page.find("#sets td a[href^='/plan']").click()
    page.until(lambda: page.text("#plan-status") == "up to date", "the plan")
    assert page.text("[data-figure=steps]") == "4"
    page.fill("[name='lora.rank']", "4")
    page.fill("[name='batch.samples_per_step']", "20")
    page.fill("[name='eval.fraction']", "0.05")
    page.fill("#overrides", "data.max_tokenz=1")
    page.until(lambda: "data.max_tokenz: unknown key" in page.text("#plan-error"), "the error")
    page.fill("#overrides", "optim.lr=5e-3\neval.every_steps=50\ngpus=[0, 1]")
    page.fill("[name='device']", "cpu")
    page.fill("[name='batch.epochs']", "30")
    page.until(lambda: page.text("[data-figure=steps]") == "180", "180 steps")
    page.until(lambda: page.text("#plan-status") == "up to date", "the plan")
    page.shoot("plan")
    page.fill("#name", "first")
    page.find("#start [type=submit]").click()


def watch_stop_and_resume(page: Page, folder: Path) -> None:
    page.until(lambda: page.all("#live .chart path.line"), "a curve")
    page.until(lambda: "of 180" in page.text("#run-status"), "the steps done")
    page.find("#stop").click()
    page.until(lambda: page.text("#state") == "stopped", "the stop")
    log = read_run(folder)
    assert log.end is not None
    assert log.end.exit_code == 75
    assert list((folder / "checkpoints").iterdir())
    assert log.start is not None
    assert log.start.num_ranks == 2
    ask_a_stopped_run(page)
    page.find("#resume").click()
    page.until(lambda: page.text("#state") == "complete", "the end of the run")
    page.until(lambda: "resumed at step" in page.text("#live"), "the last drawing")
    page.shoot("run")
    assert (folder / "final").is_dir()
    start = read_run(folder).start
    assert start is not None
    assert start.resumed_step
    assert start.num_ranks == 2


def ask_a_stopped_run(page: Page) -> None:
    """It answers from its checkpoint, and its page is there again."""
    address = page.driver.current_url
    page.find("#talk").click()
    page.fill("#prompt", "What is your name?")
    page.fill("#max-tokens", "6")
    page.find("#chat [type=submit]").click()
    page.find("#turns .answered")
    assert "not finished: it answers as it was after step" in page.text("#chat-note")
    page.driver.get(address)
    page.until(lambda: page.text("#state") == "stopped", "the run's page")


def take_it_away(page: Page, folder: Path) -> None:
    """Merge the run and write it for llama.cpp, from its page."""
    for to, file in (("merged", "merged/model.safetensors"), ("gguf", "gguf"), ("gguf-q8_0", "gguf-q8_0")):
        page.fill("#to", to)
        page.find("#take-away [type=submit]").click()
        page.until(lambda to=to: f"written: runs/first/{to}" in page.text("#take-away-status"), to)
        assert page.find("#take-away-status [data-copy]").get_attribute("data-copy") == f"runs/first/{to}"
        assert (folder / file).exists()
    (plain,), (small,) = (list((folder / name).glob("*.gguf")) for name in ("gguf", "gguf-q8_0"))
    assert small.stat().st_size < plain.stat().st_size


def name_and_note(page: Page, folder: Path) -> None:
    """A note and tags are saved and shown; another name is asked for, and taken only with a yes."""
    address = page.driver.execute_script("return location.origin")
    page.driver.get(f"{address}/run?folder=runs/first")
    page.driver.execute_script("document.getElementById('notes-box').open = true")
    page.fill("#tags", "baseline v1")
    page.fill("#note", "with two ranks")
    page.find("#notes [type=submit]").click()
    page.until(lambda: page.text("#notes-status") == "saved", "the note")
    page.until(lambda: "with two ranks" in page.text("#live .own"), "the note on the page")
    for is_sure in (False, True):
        page.find("#rename").click()
        question = page.driver.switch_to.alert
        assert "runs/first" in question.text
        question.send_keys("renamed")
        (question.accept if is_sure else question.dismiss)()
        page.until(lambda is_sure=is_sure: folder.exists() != is_sure, "the answer")
    page.until(lambda: page.text(".runbar b") == "runs/renamed", "the page of the new name")
    page.until(lambda: "baseline" in page.text("#live .tags"), "the tags")
    page.shoot("renamed")


def start_from_and_delete(page: Page, folder: Path) -> None:
    """A run's settings fill the form; the run is gone after a question, and not before."""
    address = page.driver.execute_script("return location.origin")
    page.driver.get(f"{address}/run?folder=runs/second")
    page.find("a[href^='/plan?from']").click()
    page.until(lambda: page.text("#presets-status") == "settings of runs/second", "the settings")
    assert page.find("[name='lora.rank']").get_property("value") == "4"
    assert float(page.find("[name='batch.epochs']").get_property("value")) == 30
    assert "optim.lr" not in page.find("#overrides").get_property("value")  # it has a field
    page.fill("[name='lora.alpha']", "99")
    page.fill("#earlier", "runs/second")
    page.until(lambda: not page.find("[name='lora.alpha']").get_property("value"), "the default of the earlier run")
    page.driver.get(f"{address}/run?folder=runs/second")
    (folder / "thesis.txt").write_text("years of work")
    for is_sure in (False, True):
        page.find("#delete").click()
        question = page.until(lambda: alert_of(page.driver), "the question")
        assert "runs/second" in question.text
        assert question.text.endswith("written by no run:\n\ngguf/\ngguf-q8_0/\nmerged/\nthesis.txt"), question.text
        (question.accept if is_sure else question.dismiss)()
        page.until(lambda is_sure=is_sure: folder.exists() != is_sure, "the answer")
    assert (folder.parents[1] / ".trash" / "runs" / "second" / "thesis.txt").read_text() == "years of work"


def ask_both_models(page: Page) -> None:
    page.find("#talk").click()
    page.fill("#prompt", "What is your name?")
    page.fill("#max-tokens", "12")
    page.fill("#system", "Be brief.")
    page.find("#chat [type=submit]").click()
    page.find("#turns .answered")
    assert page.text(".side.run") != page.text(".side.base")
    page.shoot("chat")


def compare_two_runs(page: Page, runs: Path) -> None:
    shutil.copytree(runs / "first", runs / "second")
    page.find("nav a[href='/runs']").click()
    for box in page.until(lambda: len(boxes := page.all("#runs [name=run]")) == 2 and boxes, "two runs"):
        box.click()
    page.until(lambda: page.text(".taken").split() == ["180", "180"], "the steps of the runs")
    assert len(page.all(".spark path")) == 2
    page.fill("#filter", "Second lora")
    assert page.until(lambda: page.text("#filter-status"), "the number") == "1 of 2 runs"
    assert page.text("#runs tbody a").strip() == "runs/second"
    page.find("#filter").clear()
    page.fill("#filter", "")
    page.shoot("runs")
    page.find("#runs [type=submit]").click()
    page.until(lambda: page.all(".chart path.line"), "curves")
    page.shoot("compare")


def alert_of(driver: Any) -> Any:
    """The question that is open; None if there is none yet."""
    from selenium.common.exceptions import NoAlertPresentException

    try:
        return driver.switch_to.alert
    except NoAlertPresentException:
        return None


@pytest.mark.slow
def test_forms_begin_with_defaults_and_send_only_what_a_person_chose(browser, studio, tiny):
    address, workspace = studio
    shutil.copy(tiny.chats, workspace / "chats.jsonl")
    page = Page(browser)
    browser.get(address)
    page.until(lambda: page.find("[name='data.name']").get_property("value") == "chats", "the name of the only file")
    sent = """
    const done = arguments[1], own = window.fetch;
    window.fetch = (path, options) => {
      if (path === arguments[0]) done(JSON.parse(options.body));
      return own(path, options);
    };
    """
    body = browser.execute_async_script(sent + "document.getElementById('build').requestSubmit()", "/api/build")
    assert body["settings"] == {"data.name": "chats", "model.name": "tiny-model"}
    assert (body["format"], body["overrides"], body["replaces"]) == ("auto", [], False)
    page.until(lambda: "of 120" in page.text("#samples-status"), "the samples")
    controls = """return [...document.querySelectorAll("[data-setting] [name]")].map(
      (one) => [one.name, one.value || one.placeholder])"""
    shown = dict(browser.execute_script(controls))
    assert shown["data.dedupe"] == "off"
    assert {name: text for name, text in shown.items() if name not in CHOSEN and not shows_default(name, text)} == {}
    browser.get(browser.execute_script("return location.origin") + "/plan")
    shown = dict(browser.execute_script(controls))
    assert {name: text for name, text in shown.items() if name not in CHOSEN and not shows_default(name, text)} == {}
    body = browser.execute_async_script(
        sent + "document.getElementById('f-lora.rank').dispatchEvent(new Event('input', {bubbles: true}))", "/api/plan"
    )
    assert body["settings"] == {"data.name": "chats", "model.name": "tiny-model"}
    assert not page.errors


@pytest.mark.slow
def test_columns_that_no_format_has_are_offered(browser, studio, tiny):
    """The page offers the columns with what stands in them, what was chosen is trained, and other files need none."""
    address, workspace = studio
    (workspace / "pairs.csv").write_text(
        "frage,antwort\n" + "".join(f"Wie heisst du?,Ich bin Test {n}.\n" for n in range(9))
    )
    (workspace / "near.csv").write_text("question,answer\nWho?,A test.\n")
    shutil.copy(tiny.chats, workspace / "chats.jsonl")
    page = Page(browser)
    browser.get(address)
    page.find("#files label:has([value='near.csv'])").click()
    page.until(lambda: "This is our guess" in page.text("#columns-note"), "the guess")
    assert page.find("#column-output").get_property("value") == "answer"
    page.find("#files label:has([value='chats.jsonl'])").click()
    page.until(lambda: not browser.find_element("id", "columns").is_displayed(), "a file that needs none")
    page.find("#files label:has([value='pairs.csv'])").click()
    page.until(lambda: "Say which of them" in page.text("#columns-note"), "the columns")
    assert "frage: Wie heisst du?" in page.text("#column-instruction")
    page.fill("#column-instruction", "frage")
    page.fill("#column-output", "antwort")
    page.shoot("columns")
    page.find("#build [type=submit]").click()
    page.until(lambda: "of 9" in page.text("#samples-status"), "the samples")
    assert "Ich bin Test 0." in page.text("#samples-body")
    assert not page.errors
