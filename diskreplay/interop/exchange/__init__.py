"""Code shared by the modules of all data set formats. Only these modules and the command line import this package.

A reader of a format returns a `Source`, and a writer of a format is a `Format`. An episode is an `EpisodeData`.
"""
