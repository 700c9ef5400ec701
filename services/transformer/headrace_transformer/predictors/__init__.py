"""Everything that talks to predictors: calls, retries, resume, replicas."""
