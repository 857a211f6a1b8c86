"""Adapters between a store and other libraries; they use only public names of diskreplay."""
