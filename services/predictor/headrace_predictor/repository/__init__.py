"""The model repository: load, unload, index, leases on served models."""
