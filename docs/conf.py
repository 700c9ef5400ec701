"""Sphinx' configuration: `make docs` builds docs/ to build/docs and fails on every warning, broken links included."""

project = "Millrace"
copyright = "Millrace's authors"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Millrace"
exclude_patterns = ["generate_settings.py"]
