"""The durable store: blocks of one rank on a disk, and the directory they lie in."""
