"""Whether the tests run in their long form, as `make test-all` runs them."""

import os

FULL = os.environ.get("FULL") == "1"
