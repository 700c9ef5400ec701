"""`make smoke`: calls every endpoint that a model should answer, and those it must refuse, on a running stack."""
