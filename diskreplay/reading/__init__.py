"""Reads the files of a store and their changes, and gives readers snapshots, episodes and rows in memory.

The package `segments` defines the format of the files. This package never writes files.
"""
