"""Matrix products, with what is computed from their result."""
