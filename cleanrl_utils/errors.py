"""How every command of the project ends on a user's mistake."""

import sys
from typing import NoReturn


def usage_error(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
