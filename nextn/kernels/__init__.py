"""The operations of one step, each family defined in plain torch (`ref`).

Imports torch, triton and `nextn.errors` only.
"""
