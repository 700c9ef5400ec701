"""What Millrace's services share, and nothing else."""
