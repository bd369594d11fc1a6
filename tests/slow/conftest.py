"""Without Ray there is nothing that the tests of the deployment could say."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_scale.py"]
