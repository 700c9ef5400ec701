"""The payload logger: takes records of requests and answers and lets them be looked up."""
