"""`python -m outrider.cli` is `outrider`."""

from . import main

main()
