"""The exception that the command line reports as a message without a traceback."""


class UserError(Exception):
    """An invalid request by the user; the text is one line with the reason."""
