"""What Headrace's services share, and nothing else."""

__version__ = "0.1.0"
