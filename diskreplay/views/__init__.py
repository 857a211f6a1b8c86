"""Views define what one item of a batch is, such as a transition; distributions define how probable each item is."""
