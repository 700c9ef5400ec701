"""The payload logger: stores records of requests and answers, and serves queries for them."""
