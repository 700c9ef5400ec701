"""The Open Inference Protocol: tensors, streams of requests, and the parameters that Headrace adds to it."""
