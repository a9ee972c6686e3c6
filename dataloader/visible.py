"""Text of data on a screen. Light: whatever prints imports it."""


def visible(text: str) -> str:
    """A text of data as a terminal may show it: control characters but the end of a line as escapes, since a
    terminal obeys them.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
