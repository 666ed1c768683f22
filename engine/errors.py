"""Errors shared by several packages. This module does not import torch."""


class Failure(Exception):
    """An error caused by the user's files, models, servers or machine. It is printed without a traceback."""


class NoServer(Failure, RuntimeError):
    """An engine has no server left."""


class CannotSend(Failure, RuntimeError):
    """Weights cannot be written to the folder that another process reads. The folder may be full."""


class NonFinite(Failure, RuntimeError):
    """A gradient, a weight or a log-probability is NaN or infinite."""


class UserCodeError(Failure, RuntimeError):
    """A user's function, named by its import path, or the import of its module raised an exception."""


class UnusableInput(Failure, RuntimeError):
    """An input of a run that cannot be used, such as data, a model or a plan."""


class UnusableModel(Failure, ValueError):
    """A model or adapter that cannot be used for training, sampling or scoring."""
