"""The error of a rank that waited for others in vain."""


class StallError(RuntimeError):
    """A rank waited for peers in vain, or they went away; the message says who waited for whom, and where."""
