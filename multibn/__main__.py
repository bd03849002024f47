"""Entry point of `python -m multibn`."""

import sys

from multibn.cli import main

if __name__ == "__main__":
    sys.exit(main())
