"""Errors shared by several packages. Imports no torch."""


class Failure(Exception):
    """An error caused by the user's files, models, servers or machine, printed without a traceback."""


class NoServer(Failure, RuntimeError):
    """An engine has no server left."""


class CannotSend(Failure, RuntimeError):
    """Weights cannot be written to the folder that another process reads; the folder may be full."""


class NonFinite(Failure, RuntimeError):
    """A gradient, a weight or a log-probability is NaN or infinite."""


class UserCodeError(Failure, RuntimeError):
    """A function that a setting names raised an exception."""


class UnusableInput(Failure, RuntimeError):
    """Data, a model or a plan that cannot be used."""


class UnusableModel(Failure, ValueError):
    """A model that cannot be trained, sampled or scored."""
