"""Mathematical answers: found in a response, read, and compared with the expected one."""
