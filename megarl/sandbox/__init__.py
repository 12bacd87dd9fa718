"""Processes for code that is not trusted to end: functions behind limits, and programs that a model wrote."""
