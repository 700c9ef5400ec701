"""The Open Inference Protocol: tensors, streams of requests, and the parameters that Millrace adds to it."""
