"""`python -m gymfast` is the command `gymfast`."""

import sys

from gymfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
