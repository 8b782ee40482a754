"""Sizes that the kernels of sparse attention work in, and why these."""

# Keys of a block. 64 rows of 512 bfloat16 channels are 64 KiB: three of them are what fits a Hopper
# SM beside a query (docs/log.md), and 64 is the height of a warpgroup's matrix product.
KEYS = 64

# Queries whose contributions to the entries exist at a time in the backward pass: 2,048 x 640 rows
# of 1 KiB are 1.25 GiB.
BACKWARD_QUERIES = 2048
