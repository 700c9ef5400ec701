"""One module a contender; `protocol` says how its process is driven. Only `millrace_engine` imports the project."""
