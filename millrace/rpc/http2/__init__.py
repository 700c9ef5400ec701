"""HTTP/2 without TLS for the gateway: REST beside gRPC, by the same methods."""
