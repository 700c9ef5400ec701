"""Predictors by the Open Inference Protocol."""
