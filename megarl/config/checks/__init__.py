"""What is wrong with a composed configuration, found before anything starts."""
