"""Appending: writers, the segments that they fill, rate limiters, and the threads that mark and seal segments."""
