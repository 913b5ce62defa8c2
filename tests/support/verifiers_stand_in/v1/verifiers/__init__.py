"""A stand-in for verifiers 0.4.0: the calls that the worker makes, with their answers' form."""

__version__ = "0.4.0"
