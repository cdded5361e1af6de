"""What kernels of several packages share: launching, guards, rows, blocks, dropout, activations."""
