"""`python -m bitcycle`: the command `bitcycle`."""

import sys

from bitcycle.cli import main

if __name__ == "__main__":
    sys.exit(main())
