"""`python -m megarl.train -m`: each run in its own process, a table at the end."""
