"""Checks whether this machine has what a configuration needs, and says what is missing and how to get it."""
