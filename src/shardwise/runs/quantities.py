"""Times, counts and bytes in a few characters."""


def clock(seconds: float) -> str:
    """Minutes and seconds, hours when there are any.

    >>> clock(65.4), clock(3725)
    ('01:05', '1:02:05')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def count(number: float) -> str:
    """A number in three digits or so.

    >>> count(950), count(12345), count(9_999_680)
    ('950', '12.3 k', '10.0 M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def size(num_bytes: int) -> str:
    """Bytes in three digits or so.

    >>> size(950), size(12_345_678)
    ('950 B', '12.3 MB')
    """
    return f"{count(num_bytes)}B" if num_bytes >= 1000 else f"{num_bytes} B"
