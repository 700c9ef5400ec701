"""Alembic's folder: `env.py` and, in `versions`, one module for each version of the schema."""
