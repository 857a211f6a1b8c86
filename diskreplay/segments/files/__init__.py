"""Files and folders: durable commits, locks, mappings, clones, file systems, machines and clocks."""
