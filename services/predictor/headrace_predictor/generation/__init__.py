"""Generation models: validation of requests, loading, the served model."""
