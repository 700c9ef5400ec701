"""The command `millrace`: starts a stack, and sends requests to a running one."""
