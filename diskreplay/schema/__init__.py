"""The fields of steps and episodes: dtypes, shapes, Gymnasium spaces, tuples. Any other package may import this one."""
