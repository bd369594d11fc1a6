"""The methods: `NAME.py` is the method `NAME`. They do not import each other."""
