"""`python -m flatout` is the `flatout` command."""

import sys

# as with -P, and by the `flatout` command: no module of the working folder, such as yaml.py, is imported
first = "" if sys.flags.safe_path else sys.path.pop(0)

from flatout.cli.main import main  # noqa: E402
from flatout.environment import let_children_import_flatout  # noqa: E402

let_children_import_flatout(first)
sys.exit(main())
