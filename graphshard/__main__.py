"""``python -m graphshard`` is the command ``graphshard``."""

import sys

from graphshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
