"""Engines in processes of their own.

The predictor's front starts a host (`host.py`), which imports the libraries of models once and forks an engine process
(`worker.py`) for each generation model. Front and engine exchange frames (engine.proto) on a Unix socket. In the
front a RemoteEngine stands for the engine. An engine dies with the host, the host with the front.
"""
