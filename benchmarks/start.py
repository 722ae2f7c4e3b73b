"""The same as `pipefit bench start`; options as there."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "start", *sys.argv[1:]]))
