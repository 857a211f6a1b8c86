"""Adapters between a store and other libraries. The adapters use only public names of diskreplay."""
