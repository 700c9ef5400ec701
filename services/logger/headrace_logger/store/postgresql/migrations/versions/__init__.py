"""The versions of the schema in PostgreSQL.

A new version is a new module, with the one before as its `down_revision`. While loggers of two versions run beside each
other, the older one continues with the new schema: a version only adds tables and columns, these with a default.
"""
