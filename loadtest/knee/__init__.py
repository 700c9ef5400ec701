"""The knee: the greatest load at which the objective is met."""
