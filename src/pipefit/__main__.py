"""`python -m pipefit` is the same as `pipefit`."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main())
