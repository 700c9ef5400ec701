"""The payload log's producer: what is recorded of a call, and how it reaches the logger."""
