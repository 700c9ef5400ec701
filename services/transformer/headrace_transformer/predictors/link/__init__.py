"""Links to predictors that generate: one for each, with the calls that it carries."""
