"""Long attacks on the durable store: each prints its seed, its counts and what it found.

`scripts/crash` runs them; the tests beside this folder run short ones and their controls.
"""
