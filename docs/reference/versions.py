"""Moves a built site to the folder of its version in SITE, and lists SITE's versions for the menu in the pages' header.

python docs/reference/versions.py BUILT SITE
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from packaging.version import Version

import flatout


def main() -> None:
    """Add a version, or replace it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("built", type=Path)
    parser.add_argument("site", type=Path)
    args = parser.parse_args()
    target = args.site / ("dev" if Version(flatout.__version__).is_devrelease else flatout.__version__)
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(args.built, target)
    list_versions(args.site)


def list_versions(site: Path) -> None:
    """Write versions.json, newest first, and an index.html that opens the newest release, or `dev` if there is none."""
    releases = sorted((Version(page.parent.name) for page in site.glob("[0-9]*/index.html")), reverse=True)
    names = ["dev"] * (site / "dev").is_dir() + [str(version) for version in releases]
    latest = str(next((version for version in releases if not version.is_prerelease), names[0]))
    rows = [{"version": name, "title": name, "aliases": ["latest"] * (name == latest)} for name in names]
    (site / "versions.json").write_text(json.dumps(rows), encoding="utf-8")
    refresh = f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={latest}/">\n'
    (site / "index.html").write_text(f'{refresh}<a href="{latest}/">flatout {latest}</a>\n', encoding="utf-8")


if __name__ == "__main__":
    main()
