"""How a setting is written in TOML."""

from collections.abc import Mapping


def toml_text(value: object) -> str:
    """The value in TOML, on one line; a mapping becomes an inline table, sorted, as its order means nothing."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_text(each) for each in value) + "]"
    if isinstance(value, Mapping):
        entries = (f"{toml_text(name)} = {toml_text(value[name])}" for name in sorted(value))
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, str):
        # A TOML basic string: JSON's escapes are among its own, but it wants control characters escaped too.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)
