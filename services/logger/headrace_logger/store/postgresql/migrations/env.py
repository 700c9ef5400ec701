"""Runs the migrations within the transaction of the connection that `schema.prepare` passes."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
