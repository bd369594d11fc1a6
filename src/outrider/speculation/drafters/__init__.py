"""Implementations that several methods share: networks, builders of chains and trees, text lookup."""
