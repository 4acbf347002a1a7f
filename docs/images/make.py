"""Takes the pictures of the documentation from a run: its report, and studio with it, light and dark.

python docs/images/make.py FOLDER RUN   # FOLDER: where `flatout studio` runs; RUN: such as runs/run

docs/images/sums.py has the commands that made the runs of today's pictures. This script needs the extras `studio` and
`browser`, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

HERE = Path(__file__).parent
WIDTH = 1280
# name: address within studio, height, and what is true of the page when it is complete
STUDIO = {
    "studio-plan": ("/plan?from={run}", 825, "document.getElementById('plan-status').textContent === 'up to date'"),
    "studio-runs": ("/runs", 494, "[...document.querySelectorAll('.took')].every((one) => one.textContent)"),
    "studio-run": ("/run?folder={run}", 1150, "document.querySelector('#live .chart path')"),
}


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    args = parser.parse_args()
    flatout = [sys.executable, "-m", "flatout"]
    with browser() as driver, tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.html")
        subprocess.run([*flatout, "report", args.run, "--out", str(report)], cwd=args.folder, check=True)
        take(driver, "report", report.as_uri(), 892, "document.querySelector('.chart path')")
        command = [*flatout, "studio", "--port", "0", "--no-browser"]
        with subprocess.Popen(command, cwd=args.folder, stdout=subprocess.PIPE, text=True) as studio:
            assert studio.stdout is not None
            address = [studio.stdout.readline() for _ in range(2)][1].strip()
            driver.get(address)
            wait(driver, "location.pathname === '/data'")
            origin = driver.execute_script("return location.origin")
            for name, (page, height, ready) in STUDIO.items():
                take(driver, name, origin + page.format(run=args.run), height, ready)
            studio.send_signal(signal.SIGINT)


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def wait(driver: Any, ready: str) -> None:
    """Wait until an expression is true of the page."""
    WebDriverWait(driver, 300).until(lambda driver: driver.execute_script(f"return {ready}"))


def take(driver: Any, name: str, address: str, height: int, ready: str) -> None:
    """Write NAME-light.png and NAME-dark.png, of the top of a page."""
    metrics = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(address)
    wait(driver, ready)
    # a folder of the machine that took the pictures says nothing to readers
    driver.execute_script("for (const one of document.querySelectorAll('.workspace')) one.textContent = 'my-project'")
    for theme in ("light", "dark"):
        driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        time.sleep(1)  # colors change gradually
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {})
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            HERE / f"{name}-{theme}.png", optimize=True
        )


if __name__ == "__main__":
    main()
