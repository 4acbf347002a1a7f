"""`python -m flatout` is the `flatout` command."""

import sys

from flatout.cli.main import main

sys.exit(main())
