"""Checks of an engine on this machine: exactness, traces of answers, and facts about the hardware."""
