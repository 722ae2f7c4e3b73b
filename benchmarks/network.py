"""The same as `pipefit bench network`; options as there."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "network", *sys.argv[1:]]))
