"""What every format of data sets shares: episodes as arrays, imports and exports that resume, the side folder."""
