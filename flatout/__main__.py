"""`python -m flatout` is the `flatout` command."""

import sys

from flatout.cli.main import main
from flatout.environment import let_children_import_flatout

let_children_import_flatout()
sys.exit(main())
