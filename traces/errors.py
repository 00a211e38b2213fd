"""The one exception that user input can raise, and how a validation error becomes its one line."""

from __future__ import annotations

from pydantic import ValidationError


class InputError(ValueError):
    """A file, option or plan that breaks a rule.

    The message is one line that says where (file, row, key) and what (the rule). The command line prints
    it to standard error and exits with status 2; nothing has been written by then.
    """


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a pydantic error as ``key: rule``, in one line."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").replace("\n", " ")
    text = f"{key}: {message}" if key else message
    value = problem.get("input")
    return f"{text} (got {value!r})" if isinstance(value, str | int | float) else text
