"""How every command of the project says what is wrong: in lines that can be printed, whatever names files hold."""

import sys
from contextlib import suppress
from typing import NoReturn


def usage_error(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def warn(message: str) -> None:
    """One line to stderr; the program goes on."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    with suppress(OSError, ValueError):  # stderr may be a file on a full disk, or closed
        print(line, file=sys.stderr)
