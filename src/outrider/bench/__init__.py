"""Measurements: how fast, beside what, in the same run."""
