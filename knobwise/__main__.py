"""`python -m knobwise`."""

import sys

from knobwise.experiments.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
