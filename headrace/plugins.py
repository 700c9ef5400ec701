"""Plugins of pydantic are for users' code. Our programs start without the search for them, which reads the metadata of
all installed packages: each of them imports this before pydantic. `search` precedes the import of users' code.

Of pydantic's three values for none, "true" is ours: a user who wants none sets another (`__all__`, `1`).
"""

import os

_NAME, _OURS = "PYDANTIC_DISABLE_PLUGINS", "true"
os.environ.setdefault(_NAME, _OURS)


def search() -> None:
    """Has pydantic find plugins from now on, unless the user has disabled them."""
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]
