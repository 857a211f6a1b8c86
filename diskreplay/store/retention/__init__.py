"""What leaves a store: by size, by age, and by hand."""
