"""The command `millrace`: starts a stack, and talks to a running one."""
