"""What bounds a call before it is handled: how many there are, how large and how idle."""
