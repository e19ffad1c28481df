"""A bar on the terminal for what goes through all bytes of a checkpoint."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the bytes that are done and the bytes in all.

    The bar is on stderr, and goes at the end. Where stderr is no terminal, nothing is shown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
