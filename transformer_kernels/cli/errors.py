"""The one exception that the command line turns into a message."""


class UserError(Exception):
    """What the user asked for cannot be done; the text is one line that says why."""
