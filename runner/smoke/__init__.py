"""`make smoke`: every endpoint that a model should answer, and those it must refuse, against a running stack."""
