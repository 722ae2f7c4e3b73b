"""The same as `pipefit bench partition`; options as there."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "partition", *sys.argv[1:]]))
