"""The fields of steps and episodes: dtypes, shapes, Gymnasium spaces, tuples. Every other part may use it."""
