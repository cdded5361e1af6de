"""One room per pattern. Installed as fusion_backend.patterns; refuses to be imported under another name."""

if __name__ != "fusion_backend.patterns":
    raise ImportError("import fusion_backend.patterns: a bare `import patterns` would load a second copy")

from fusion_backend.patterns import add_mul, add_mul_exp, gated_linear, layer_norm, quantize_int8

__all__ = ["add_mul", "add_mul_exp", "gated_linear", "layer_norm", "quantize_int8"]
