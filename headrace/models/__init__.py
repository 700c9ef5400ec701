"""Sources and kinds of models, and the download of their files."""
