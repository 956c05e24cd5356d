"""Context parallelism: a sequence is cut over ranks, which run one proved program."""
