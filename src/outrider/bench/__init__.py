"""Measurements of speed, acceptance and memory, each against a baseline in the same run."""
