"""The users of the load test, one kind of call each."""
