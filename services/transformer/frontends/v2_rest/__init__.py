"""The V2 protocol's REST: what its bodies say, as the messages of `GRPCInferenceService`, and back."""
