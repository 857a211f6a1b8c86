"""What every format of data sets shares: episodes as arrays, imports that resume, exports that appear whole."""
