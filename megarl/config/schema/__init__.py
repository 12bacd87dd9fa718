"""The typed configuration: one file of dataclasses for each group of conf/."""
