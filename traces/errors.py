"""The one exception that user input can raise."""


class InputError(ValueError):
    """A file, option or plan that breaks a rule.

    The message is one line that says where (file, row, key) and what (the rule). The command line prints
    it to standard error and exits with status 2; nothing has been written by then.
    """
