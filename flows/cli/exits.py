"""Exit codes, and the exception that ends a command with one line and one of them."""

DONE, FAILED, USAGE, REFUSED = 0, 1, 2, 3


class Stop(Exception):
    """End the command: the message is the one line that the user sees."""

    def __init__(self, message: str, code: int = FAILED):
        super().__init__(message)
        self.code = code
