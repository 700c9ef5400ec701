"""`headrace replay`: runs logged generations again at another stack, and compares the answers token by token."""
