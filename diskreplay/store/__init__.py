"""Many segments as one store: writers, snapshots, retention."""
