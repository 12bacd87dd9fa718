"""`python -m megarl.train -m`: each run in its own process, one shared value pretraining, a table at the end."""
