"""Bilinear interpolation of images, forward and backward."""
