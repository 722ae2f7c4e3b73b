"""The same as `pipefit bench prediction`; options as there."""

import sys

from pipefit.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prediction", *sys.argv[1:]]))
