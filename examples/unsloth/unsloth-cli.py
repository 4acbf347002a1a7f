"""Fine-tune with the flags of Unsloth's script, also under torchrun: python unsloth-cli.py --help."""

import sys

from flatout_migrate.doors.unsloth_cli import main

sys.exit(main())
