"""`python -m megarl.train -m`: each run in a process of its own, one value pretraining for all, a table at the end."""
