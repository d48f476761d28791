"""`python -m cute_gemma` is `cute-gemma`."""

import sys

from .cli import main

sys.exit(main())
