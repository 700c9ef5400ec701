"""The load test: Locust users for the gateway."""
