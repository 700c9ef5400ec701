"""Estimates of load: the pace of prefills, queue times, progress."""
