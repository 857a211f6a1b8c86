"""Pure array functions: short serial kernels, each beside its plain twin. Nothing here knows a file."""
