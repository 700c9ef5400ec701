"""HTTP/2 without TLS: REST for the gateway by the same handlers as gRPC, and long calls between our services."""
