"""The fields of steps and episodes: dtypes, shapes, Gymnasium spaces, tuples. Every other package may import it."""
