"""Parts of tools/bench/claims.py: tasks, runs, verdicts and the page."""
