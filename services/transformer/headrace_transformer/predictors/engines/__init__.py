"""Engines that speak OpenAI's API, at addresses of their own."""
