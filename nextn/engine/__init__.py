"""Scheduling, memory, and the speculative step; knows tokens and tensors, nothing of HTTP."""
