"""`python -m safeckpt`."""

import sys

from safeckpt.cli import main

sys.exit(main())
