"""The contract of every served model, and its weights."""
