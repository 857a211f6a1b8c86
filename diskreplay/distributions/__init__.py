"""Distributions: rules by which ids are drawn and weighted, without reading observations or rewards."""
