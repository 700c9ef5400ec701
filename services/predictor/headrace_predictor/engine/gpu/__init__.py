"""Triton kernels for a model on a GPU, and what they take."""
