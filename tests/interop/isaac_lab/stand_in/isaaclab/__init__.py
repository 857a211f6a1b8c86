"""A stand-in for Isaac Lab, which needs a simulator: what a recorder term sees of it, in the same order of calls."""
