"""`python -m fulgurite` is the `fulgurite` command."""

import sys

from fulgurite.cli import main

sys.exit(main())
