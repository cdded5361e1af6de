"""Sums over the ranks of a process group, through memory that the ranks share."""
