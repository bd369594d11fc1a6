"""Keep `from outrider.train.telling import Lines` working."""  # deprecated alias of outrider.train.progress

from .progress import TextProgress as Lines  # deprecated alias

__all__ = ["Lines"]
