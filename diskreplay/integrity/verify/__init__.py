"""The independent checker, which shares no code with readers and writers."""
