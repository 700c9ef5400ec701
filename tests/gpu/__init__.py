"""Judges a machine with a GPU in at most nine minutes: `python tests/gpu/run.py`, docs/gpu.md.

run.py runs the parts, each in a process of its own: machine.py, kernels.py, exactness.py, speed.py, stack.py. They load
nothing that the wheels of wheels.py and a machine with torch and transformers do not have.
"""
