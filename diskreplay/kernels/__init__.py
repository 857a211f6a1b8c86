"""Pure array functions: short serial kernels. Nothing here knows a file."""
