"""The gradient of an embedding."""
