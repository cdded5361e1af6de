"""Images that are resized or pooled, contiguous or channels-last, with their gradients."""
