"""One module for each contender; `protocol` defines how its process is controlled. Only `headrace_engine` imports the
project.
"""
