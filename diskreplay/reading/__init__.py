"""Reading: follows the files of a store, and makes snapshots, episodes and chunks of what it found."""
