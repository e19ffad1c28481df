"""Which tests run which line: noted by the files that `listed.marked` has changed, in launched processes too."""

import os

FILE = "MUTANT_MARKS"
"""The variable of the environment that names the file of the notes."""

_noted: set[tuple[str, str]] = set()


def note(mutant: str) -> None:
    """The statement that this mutant changes is about to run."""
    # pytest keeps it for the processes of a test too. While a module is imported there is none.
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (mutant, test) in _noted or FILE not in os.environ:
        return
    _noted.add((mutant, test))
    # One short write to the end of a file is whole, whichever processes write at a time.
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{mutant} {test}\n".encode())
    finally:
        os.close(descriptor)
