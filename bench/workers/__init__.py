"""One module for each contender; `protocol` defines how its process is controlled. Only `millrace_engine` imports the
project.
"""
