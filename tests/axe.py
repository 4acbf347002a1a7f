"""axe-core, the checker of accessibility, on a page that a browser shows; without it there is nothing to check.

`npm install --prefix build axe-core` gets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "build" / "node_modules" / "axe-core" / "axe.min.js"
RULES = """
const done = arguments[0], root = document.documentElement, found = [], opened = [...document.querySelectorAll("details:not([open])")];
(async () => {
  opened.forEach((one) => { one.open = true; });
  const theme = root.dataset.theme;
  for (const one of ["light", "dark"]) {
    root.dataset.theme = one;
    const { violations } = await axe.run();
    for (const { id, nodes } of violations) found.push(`${one}: ${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(" ")}`);
  }
  root.dataset.theme = theme;
  opened.forEach((one) => { one.open = false; });
  done(found);
})();
"""  # noqa: E501


def violations(driver: Any) -> list[str]:
    """Return what breaks a rule on the page, in its light and its dark colors, with all that is folded unfolded."""
    if not SCRIPT.is_file():
        return []
    driver.set_script_timeout(300)
    driver.execute_script(SCRIPT.read_text())
    return list(driver.execute_async_script(RULES))
