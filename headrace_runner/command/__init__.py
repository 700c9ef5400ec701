"""The command `headrace`: starts a stack, and sends requests to a running one."""
