"""`python -m fusion_backend`: the command line."""

import sys

from fusion_backend.frontends.command_line import main

if __name__ == "__main__":
    sys.exit(main())
