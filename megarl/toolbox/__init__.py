"""Tools: functions that a policy may call in a conversation, each call in a process with limits."""
