"""Images at several scales, resized to be joined or compared, and features of images put between
embedded words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import ALL, BOTH, Called, features, problem

FEW = dict(n=2, c=8, side=8)


@problem(
    "transformers SegformerDecodeHead: four levels as tokens, projected, enlarged, joined",
    dict(n=8, c=256, side=128),
    FEW,
    ALL,
)
def all_mlp_head(n, c, side):
    widths = (c // 8, c // 4, 5 * c // 8, c)

    def forward(m, *levels):
        size, found = levels[0].shape[2:], []
        for project, x in zip(m.projections, levels, strict=True):
            h, w = x.shape[2:]
            x = project(x.flatten(2).transpose(1, 2)).permute(0, 2, 1).reshape(n, -1, h, w)
            found.append(F.interpolate(x, size=size, mode="bilinear", align_corners=False))
        x = m.norm(m.fuse(torch.cat(found[::-1], dim=1))).relu()
        return m.classifier(F.dropout(x, 0.0, m.training))

    parts = dict(projections=nn.ModuleList(nn.Linear(width, c) for width in widths))
    parts |= dict(fuse=nn.Conv2d(4 * c, c, 1, bias=False), norm=nn.BatchNorm2d(c))
    levels = (features(n, width, side >> i, side >> i) for i, width in enumerate(widths))
    return Called(forward, **parts, classifier=nn.Conv2d(c, 19, 1)), tuple(levels)


@problem(
    "DPT and Depth Anything: residual units, a fusion of two levels, enlarged, projected",
    dict(n=4, c=256, side=74),
    FEW,
    ALL,
)
def depth_fusion(n, c, side):
    def unit(convs, x):
        out = convs[1](F.relu(convs[0](F.relu(x))))
        return out + x

    def forward(m, x, skip):
        x = unit(m.second, x + unit(m.first, skip))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        return m.project(x)

    def convs():
        return nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(2))

    module = Called(forward, first=convs(), second=convs(), project=nn.Conv2d(c, c, 1))
    return module, (features(n, c, side, side), features(n, c, side, side))


@problem(
    "milesial/Pytorch-UNet: an up step with bilinear=True, padded, joined, two convolutions",
    dict(n=8, c=128, side=64),
    FEW,
    ALL,
)
def bilinear_up_step(n, c, side):
    def forward(m, low, high):
        low = m.up(low)
        down, across = high.size(2) - low.size(2), high.size(3) - low.size(3)
        low = F.pad(low, [across // 2, across - across // 2, down // 2, down - down // 2])
        return m.convs(torch.cat([high, low], dim=1))

    def block(a, b):
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]

    convs = nn.Sequential(*block(2 * c, c), *block(c, c // 2))
    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
    inputs = features(n, c, side, side), features(n, c, 2 * side + 1, 2 * side + 1)
    return Called(forward, up=up, convs=convs), inputs


@problem(
    "UperNet: a pyramid of pooled maps, enlarged and joined",
    dict(n=8, c=512, side=64),
    FEW,
)
def pyramid_pooling(n, c, side):
    def forward(m, x):
        found = [x]
        for scale, block in zip((1, 2, 3, 6), m.blocks, strict=True):
            pooled = block(F.adaptive_avg_pool2d(x, scale))
            found.append(F.interpolate(pooled, size=x.shape[2:], mode="bilinear"))
        return m.bottleneck(torch.cat(found, dim=1))

    def block(a, b, kernel):
        conv = nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    blocks = nn.ModuleList(block(c, c // 4, 1) for _ in range(4))
    return Called(forward, blocks=blocks, bottleneck=block(2 * c, c, 3)), (
        features(n, c, side, side),
    )


@problem(
    "detectron2 SemSegFPNHead: levels enlarged step by step, summed, predicted, its loss",
    dict(n=4, c=128, side=128),
    FEW,
    "train f32, train bf16",
)
def feature_pyramid_loss(n, c, side):
    def forward(m, target, *levels):
        total = None
        for head, x in zip(m.heads, levels, strict=True):
            x = head(x)
            total = x if total is None else total + x
        logits = F.interpolate(
            m.predictor(total), scale_factor=4, mode="bilinear", align_corners=False
        )
        return F.cross_entropy(logits.float(), target, reduction="mean", ignore_index=255) * 0.5

    def head(level):
        parts = []
        for _ in range(max(1, level)):
            parts += [nn.Conv2d(c, c, 3, padding=1, bias=False), nn.GroupNorm(4, c), nn.ReLU()]
            if level:
                parts += [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)]
        return nn.Sequential(*parts)

    heads = nn.ModuleList(head(level) for level in range(3))
    target = torch.randint(0, 54, (n, 4 * side, 4 * side))
    levels = (features(n, c, side >> level, side >> level) for level in range(3))
    return Called(forward, heads=heads, predictor=nn.Conv2d(c, 54, 1)), (target, *levels)


@problem(
    "Segment Anything: masks enlarged, cut, brought to the size of the image, a bound",
    dict(n=64, side=256),
    dict(n=2, side=8),
    "infer f32, infer bf16",
)
def mask_postprocessing(n, side):
    def forward(m, masks):
        masks = F.interpolate(masks, (4 * side, 4 * side), mode="bilinear", align_corners=False)
        masks = masks[..., : 3 * side, : 4 * side]
        masks = F.interpolate(masks, (4 * side - 3, 5 * side), mode="bilinear", align_corners=False)
        return masks > 0.0, masks.flatten(1).amax(1)

    return Called(forward), (features(n, 1, side, side),)


@problem(
    "transformers Qwen2-VL: words embedded, features of images in their place, a norm, a product",
    dict(n=8, seq=1024, width=2048),
    dict(n=2, seq=12, width=16),
    BOTH,
)
def images_between_words(n, seq, width):
    def forward(m, ids, patches):
        embeds = m.embed(ids)
        images = m.merger(patches).to(embeds.device, embeds.dtype)
        mask = ids == 5
        mask_expanded = mask.unsqueeze(-1).expand_as(embeds).to(embeds.device)
        embeds = embeds.masked_scatter(mask_expanded, images)
        x = F.rms_norm(embeds, (width,), m.weight, 1e-6)
        return embeds + m.project(x)

    ids = torch.randint(6, 8000, (n, seq))
    ids[:, 4 : 4 + seq // 2] = 5
    parts = dict(embed=nn.Embedding(8000, width), weight=nn.Parameter(torch.ones(width)))
    parts |= dict(merger=nn.Linear(width // 2, width), project=nn.Linear(width, width, bias=False))
    return Called(forward, **parts), (ids, features(n * (seq // 2), width // 2))
