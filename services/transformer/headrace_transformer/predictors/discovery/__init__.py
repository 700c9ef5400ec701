"""Which predictors there are, and what they serve."""
