"""The model repository: load, unload, index, leases on what is served."""
