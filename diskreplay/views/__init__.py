"""Views decide what one item of a batch is. They know nothing of probabilities."""
