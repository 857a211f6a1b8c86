"""Reading: following the files of a store, and what is known of it at a moment."""
