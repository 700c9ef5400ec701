"""Sphinx' configuration: `make docs` builds docs/ to build/docs and fails on every warning, broken links included."""

project = "Headrace"
copyright = "Headrace's authors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Headrace"
exclude_patterns = ["generate_settings.py"]
