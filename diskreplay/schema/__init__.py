"""The fields of a step and of an episode: dtypes, shapes, Gymnasium spaces, tuples. Every other part may use it."""
