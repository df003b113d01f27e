"""The one class of errors that a person can mend: what is wrong, the value, and what to give instead."""


class UserError(ValueError):
    """A setting, a file or a machine is not as it has to be; the text says what to do.

    A command tells it in one line and ends with status 2. Any other ValueError is a fault of the program's.
    """
