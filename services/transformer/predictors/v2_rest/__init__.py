"""A predictor that is called by the protocol's V2 REST (`TRANSFORMER_PROTOCOL=v2`)."""
