"""The same as `pipefit bench lean`; options as there."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "lean", *sys.argv[1:]]))
