"""`grpo-lean COMMAND …` as it is installed, for tests that start it by a file."""

import sys

from grpo.commands import main

if __name__ == "__main__":
    sys.exit(main())
