"""Views: what an id means. They know nothing of probabilities."""
