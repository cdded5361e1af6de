"""Facts about a graph that are known before any site is decided. They are computed once, then only
read.
"""

from __future__ import annotations

from torch import fx

from fusion_backend.capture.aliases import writers_of
from fusion_backend.capture.subgraphs import outside
from fusion_backend.capture.view import View
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.masks.analysis import Masks
from fusion_backend.match.matcher import Match


class Facts:
    """The facts of one view: order, aliases, writers, masks, and where gradients are wanted.

    `inner` are the facts of the bodies inside it, by name. `writers`: storage -> nodes that may
    write to it, if the caller knows them.
    """

    def __init__(
        self,
        view: View,
        canon: Canon,
        exact_masks: bool,
        inner: dict[str, Facts],
        writers: dict[int, list[fx.Node]] | None = None,
    ):
        self.view, self.canon = view, canon
        self.order = {n: i for i, n in enumerate(view.graph.nodes)}
        if writers is None:
            writers = writers_of(view, {name: facts.writers for name, facts in inner.items()})
        self.writers: dict[int, list[fx.Node]] = writers
        self.masks = Masks(view, canon, self.writers, exact_masks)
        for name, facts in inner.items():
            facts.masks.connect(self.masks, outside(view, name))

    def training(self, match: Match) -> bool:
        """Will a gradient of the site be asked for?"""
        grad = all(self.view.region.get(r, (True,))[0] for r in match.roots)
        grad = grad and any(r.meta["val"].is_floating_point() for r in match.roots)
        return grad and any(map(self.view.trains, (*match.nodes_read, *match.roots)))
