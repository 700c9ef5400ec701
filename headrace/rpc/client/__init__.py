"""Calls to other hops: channels, their spans and errors, the caller's key."""
