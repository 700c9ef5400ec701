"""One request of the Open Inference Protocol: text, processed or relayed."""
