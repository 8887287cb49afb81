"""``python -m rlhelpers``: the course's work without a notebook."""

from __future__ import annotations

import sys

from rlhelpers.command_line import main

if __name__ == "__main__":
    sys.exit(main())
