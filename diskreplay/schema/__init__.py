"""The fields of steps and episodes: dtypes, shapes, Gymnasium spaces, tuples.

All other packages may import `diskreplay.schema`.
"""
