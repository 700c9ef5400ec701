"""What Headrace's services share, and nothing else."""

import os

# The search for plugins of pydantic reads the metadata of all installed packages, at the start of every process.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

__version__ = "0.1.0"
