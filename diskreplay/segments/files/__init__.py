"""Files and folders: durable commits, locks, mappings, copies, segment numbers, and the machine with its clocks."""
