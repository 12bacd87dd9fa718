"""Verifiers: from a prompt and a response to a Score."""
