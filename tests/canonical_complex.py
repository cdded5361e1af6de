"""Words for complex numbers and for pairs of neighbours: cases of test_canonical.py."""

import torch

X, T = (2, 4, 6), (4, 3)  # rows of pairs, turns


def turned(x, c, s):
    """(x1 + i x2) · (c + i s) in real numbers."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return x1 * c - x2 * s, x1 * s + x2 * c


def number(x):
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def parts_of_pairs(x):
    h = x.view(4, 3, 8)
    return h.exp(), h[..., ::2], h[..., 1::2], h[..., :4], h[..., 4:]


def parts_of_views(x):
    """Of views of a view, which are views of the first tensor."""
    h = x.view(4, 3, 8)
    pairs, halves = h.unflatten(-1, (-1, 2)), h.view(4, 3, 2, 4)
    return h.exp(), *pairs.unbind(-1), halves[..., 0, :], halves[:, :, 1]


# what is computed, on which inputs, in words that become one expression
COMPLEX = {
    "product of complex numbers": (
        (X, T, T),
        lambda x, c, s: torch.stack(turned(x, c, s), -1).flatten(-2),
        lambda x, c, s: torch.view_as_real(number(x) * torch.complex(c, s)).flatten(-2),
        lambda x, c, s: torch.view_as_real(torch.complex(c, s) * number(x)).view(2, 4, 6),
        lambda x, c, s: (lambda z: torch.stack((z.real, z.imag), -1).flatten(2))(
            number(x) * torch.view_as_complex(torch.stack((c, s), -1))
        ),
    ),
    "parts of a complex number": (
        (T, T),
        lambda c, s: torch.stack((c, s), -1),
        lambda c, s: torch.view_as_real(torch.complex(c, s)),
        lambda c, s: (lambda z: torch.stack((z.real, z.imag), -1))(torch.complex(c, s)),
    ),
    "pairs and halves of a view": (((4, 24),), parts_of_pairs, parts_of_views),
}

# words that must stay two expressions
OTHER_COMPLEX = {
    "other products of complex numbers": (
        (X, T, T),
        lambda x, c, s: torch.view_as_real(number(x) * torch.complex(c, s)),
        lambda x, c, s: torch.view_as_real(number(x) * torch.complex(s, c)),
        lambda x, c, s: torch.view_as_real(number(x) + torch.complex(c, s)),
        lambda x, c, s: torch.view_as_real(number(x) / torch.complex(c, s)),
        lambda x, c, s: torch.view_as_real(number(x) * c),
        lambda x, c, s: torch.view_as_real(number(x.double()) * torch.complex(c, s)).float(),
    ),
    "the other part": (
        (X, T, T),
        lambda x, c, s: (number(x) * torch.complex(c, s)).real,
        lambda x, c, s: (number(x) * torch.complex(c, s)).imag,
        lambda x, c, s: (number(x) * torch.complex(c, s)).abs(),
    ),
    "pairs of another view": (
        ((4, 24),),
        lambda x: x.view(4, 3, 4, 2)[..., 0],
        lambda x: x.view(4, 12, 2)[..., 0],
        lambda x: x.view(4, 3, 2, 4)[..., 0, :],
        lambda x: x.view(2, 6, 4, 2)[..., 0],
    ),
}
