"""The services: transformer, predictor, logger. None imports another."""
