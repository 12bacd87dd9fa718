"""Says what of a run's needs is there on this machine, what is missing for the chosen configuration, how to get it."""
