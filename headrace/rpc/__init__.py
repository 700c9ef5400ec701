"""gRPC servers and channels: start and drain, admission, errors, interceptors, health."""
