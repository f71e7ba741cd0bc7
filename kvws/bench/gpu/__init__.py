"""Kernels on a GPU: checked against their references, timed, and put together to a step.

Needs torch and triton beside this package, and nothing else: the machine may be a bare one.
"""
