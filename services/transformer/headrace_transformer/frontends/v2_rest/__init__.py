"""The V2 protocol's REST: its bodies, converted to and from the messages of `GRPCInferenceService`."""
