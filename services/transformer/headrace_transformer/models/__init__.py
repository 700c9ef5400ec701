"""The transformer's data about each model, and users' processors."""
