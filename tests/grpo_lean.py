"""`grpo-lean COMMAND …` as it is installed, for tests that start it by a file."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder, which has a `rewards`, too

from grpo.commands import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
