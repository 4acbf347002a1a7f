"""python unsloth-cli.py --help: fine-tune by the flags of Unsloth's script, also under torchrun."""

import sys

from flatout_frontdoors.unsloth_cli import main

sys.exit(main())
