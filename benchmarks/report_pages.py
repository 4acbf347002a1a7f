"""Seconds and size of the report of a long run; screenshots of pages, light and dark, wide and narrow.

python benchmarks/report_pages.py --steps 100000
python benchmarks/report_pages.py --screenshots shots runs/run/report.html   # needs chromium and selenium
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synthetic_run import write_synthetic_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    parser.add_argument("pages", nargs="*", type=Path)
    args = parser.parse_args()
    if args.screenshots:
        args.screenshots.mkdir(parents=True, exist_ok=True)
        take_screenshots(args.pages, args.screenshots)
        return
    with tempfile.TemporaryDirectory(prefix="flatout-report-") as place:
        folder = write_synthetic_run(Path(place) / "run", num_steps=args.steps, num_evals=100)
        started, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-m", "flatout", "report", str(folder)], check=True)
        wall_s, after = time.monotonic() - started, os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        size = (folder / "report.html").stat().st_size / 1e6
        print(f"{args.steps:,} steps: {wall_s:.1f} s, {cpu_s:.1f} s of CPU, {size:.1f} MB")


def take_screenshots(pages: list[Path], folder: Path) -> None:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    for page in pages:
        for theme in ("light", "dark"):
            for width in (1280, 400):
                metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                driver.get(page.absolute().as_uri())
                driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
                height = driver.execute_script("return document.documentElement.scrollHeight")
                clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
                shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
                (folder / f"{page.stem}-{theme}-{width}.png").write_bytes(base64.b64decode(shot["data"]))
    driver.quit()


if __name__ == "__main__":
    main()
