"""HTTP/2 without TLS for the gateway: REST by the same handlers as gRPC."""
