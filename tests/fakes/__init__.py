"""The loop's three interfaces (megarl/interfaces.py) in one process, exact and in milliseconds.

tests/e2e/test_contract.py runs the same checks against these and against the real parts, so that they cannot drift.
"""
