"""Files and folders: durable commits, locks, mappings, copies, numbers of segments, machines and clocks."""
