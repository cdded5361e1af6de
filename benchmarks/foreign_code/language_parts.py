"""Language models of 2024 to 2026: hybrid layers, norms, residual streams, experts, adapters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm, angles, repeated, rotated
from benchmarks.foreign_code.encoders import split
from benchmarks.foreign_code.problems import ALL, Called, features, problem

TEXT, FEW = dict(n=4, seq=1024, width=1024), dict(n=2, seq=8, width=32)


def plain(**sizes: tuple[int, int]) -> dict[str, nn.Linear]:
    return {name: nn.Linear(a, b, bias=False) for name, (a, b) in sizes.items()}


@problem(
    "transformers FalconH1 layer: Mamba-2 and grouped attention behind one norm, multipliers",
    TEXT,
    FEW,
)
def parallel_hybrid_layer(n, seq, width):
    heads = max(2, width // 64)
    d, chunk, chunks = width // heads, max(4, seq // 16), seq // max(4, seq // 16)

    def decays(total):
        apart = total[..., :, None] - total[..., None, :]
        keep = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).tril()
        return torch.exp(apart.masked_fill(~keep, float("-inf")))

    def mixer(m, x):
        projected = m.inside(x * 1.25) * m.mup
        gate, xbc, dt = projected.split([width, width + 2 * d, heads], dim=-1)
        xbc = F.silu(m.conv(xbc.transpose(1, 2))[..., :seq].transpose(1, 2))
        h, b, c = torch.split(xbc.float().view(n, chunks, chunk, -1), [width, d, d], dim=-1)
        dt = torch.clamp(F.softplus(dt.float() + m.dt_bias.float()), 0.0, 1.0)
        dt = dt.view(n, chunks, chunk, heads)
        h = h.view(n, chunks, chunk, heads, d)
        total = (-torch.exp(m.a_log.float()) * dt).permute(0, 3, 1, 2).cumsum(dim=-1)
        h_dt = h * dt[..., None]
        scores = (c @ b.transpose(-1, -2))[:, None] * decays(total)
        y = torch.einsum("bhcls,bcshp->bclhp", scores, h_dt)
        to_end = torch.exp(total[..., -1:] - total).permute(0, 2, 3, 1)[..., None]
        states = torch.einsum("bcln,bclhp->bchpn", b, h_dt * to_end)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        passed = decays(F.pad(total[..., -1], (1, 0)).cumsum(dim=-1))
        states = torch.einsum("bhzc,bchpn->bzhpn", passed, states)[:, :-1]
        earlier = torch.einsum("bcln,bchpn->bclhp", c, states)
        y = y + earlier * torch.exp(total).permute(0, 2, 3, 1)[..., None]
        y = (y + h * m.d[:, None].float()).reshape(n, seq, 2, -1)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = m.weight * y.reshape(n, seq, width).to(x.dtype)
        return m.out(y * F.silu(gate))

    def forward(m, x, cos, sin):
        h = m.norms[0](x)
        q, k, v = split(m.q(h), heads), split(m.k(h) * 0.7, heads // 2), split(m.v(h), heads // 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, repeated(k, 2), repeated(v, 2), is_causal=True)
        x = x + mixer(m, h) * 0.3 + m.o(a.transpose(1, 2).reshape(n, seq, -1)) * 0.9
        h = m.norms[1](x)
        return x + m.down(m.up(h) * F.silu(m.gate(h) * 0.8)) * 0.4

    inner = 2 * width + 2 * d + heads
    parts = plain(inside=(width, inner), out=(width, width), q=(width, width), o=(width, width))
    parts |= plain(k=(width, heads // 2 * d), v=(width, heads // 2 * d))
    parts |= plain(gate=(width, 2 * width), up=(width, 2 * width), down=(2 * width, width))
    wide = width + 2 * d
    parts |= dict(conv=nn.Conv1d(wide, wide, 4, padding=3, groups=wide))
    parts |= {k: nn.Parameter(torch.rand(heads)) for k in ("dt_bias", "a_log", "d")}
    parts |= dict(norms=nn.ModuleList([RMSNorm(width), RMSNorm(width)]))
    module = Called(forward, **parts, weight=nn.Parameter(torch.ones(width)))
    mup = torch.ones(inner)
    mup[:width], mup[width : 2 * width], mup[-heads:] = 0.35, 0.25, 0.5
    module.register_buffer("mup", mup)
    return module, (features(n, seq, width), *angles(seq, d))


@problem(
    "Kimi Linear, torch chunks: a decay for each channel, triangular systems, states in a loop",
    dict(n=8, seq=512, width=1024),
    FEW,
)
def channel_decay_chunks(n, seq, width):
    heads, chunks = max(2, width // 128), max(2, seq // 64)

    def chunked(x):
        return x.reshape(n, chunks, seq // chunks, heads, -1).permute(0, 3, 1, 2, 4).float()

    def unit(x):
        return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

    def forward(m, x):
        q, k, v = (
            chunked(F.silu(conv(project(x).transpose(1, 2))[..., :seq]).transpose(1, 2))
            for conv, project in zip(m.convs, (m.q, m.k, m.v), strict=True)
        )
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        g = F.softplus(m.f_b(m.f_a(x)).float() + m.dt_bias.float()).view(n, seq, heads, -1)
        g = chunked(-m.a_log.float().exp()[:, None] * g).cumsum(dim=-2)
        beta = chunked(m.b(x).sigmoid())
        k_up, k_down = k * beta * g.exp(), (k * (-g).exp()).transpose(-1, -2)
        eye = torch.eye(seq // chunks, device=x.device, dtype=torch.float32)
        rhs = torch.cat([v * beta, k_up], dim=-1)
        system = (k_up @ k_down).tril(-1) + eye
        u, w = torch.linalg.solve_triangular(system, rhs, upper=False).chunk(2, dim=-1)
        q = q * g.exp()
        scores = (q @ k_down).tril()
        state, outs = torch.zeros_like(k_down[:, :, 0] @ v[:, :, 0]), []
        for i in range(chunks):
            rest = u[:, :, i] - w[:, :, i] @ state
            outs.append(q[:, :, i] @ state + scores[:, :, i] @ rest)
            last = g[:, :, i, -1:]
            kept = (k[:, :, i] * (last - g[:, :, i]).exp()).transpose(-1, -2)
            state = state * last.exp().transpose(-1, -2) + kept @ rest
        y = torch.stack(outs, dim=2).permute(0, 2, 3, 1, 4).reshape(n, seq, heads, -1)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * m.weight.float()
        y = y * torch.sigmoid(m.g_b(m.g_a(x)).float().view_as(y))
        return m.o(y.to(x.dtype).flatten(2))

    d = width // heads
    parts = plain(**{name: (width, width) for name in "qkvo"}, b=(width, heads))
    parts |= plain(f_a=(width, d), f_b=(d, width), g_a=(width, d), g_b=(d, width))
    convs = (nn.Conv1d(width, width, 4, padding=3, groups=width, bias=False) for _ in range(3))
    parts |= dict(convs=nn.ModuleList(convs), weight=nn.Parameter(torch.ones(d)))
    parts |= dict(
        a_log=nn.Parameter(torch.rand(heads) - 4), dt_bias=nn.Parameter(torch.rand(width))
    )
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "transformers Olmo2 layer: norms of whole queries and keys in front of heads, norms last",
    dict(n=8, seq=1024, width=1024),
    FEW,
)
def whole_query_norms(n, seq, width):
    heads = max(2, width // 128)

    def forward(m, x, cos, sin):
        q, k, v = m.q_norm(m.q(x)), m.k_norm(m.k(x)), m.v(x)
        q, k, v = (y.view(n, seq, -1, width // heads).transpose(1, 2) for y in (q, k, v))
        q, k = rotated(q, cos, sin), repeated(rotated(k, cos, sin), 2)
        a = F.scaled_dot_product_attention(q, k, repeated(v, 2), is_causal=True)
        h = x + m.attention_norm(m.o(a.transpose(1, 2).contiguous().view(n, seq, -1)))
        return h + m.mlp_norm(m.down(F.silu(m.gate(h)) * m.up(h)))

    half = width // 2
    parts = plain(q=(width, width), k=(width, half), v=(width, half), o=(width, width))
    parts |= plain(gate=(width, 3 * width), up=(width, 3 * width), down=(3 * width, width))
    norms = {k: RMSNorm(width) for k in ("q_norm", "attention_norm", "mlp_norm")}
    module = Called(forward, **parts, **norms, k_norm=RMSNorm(half))
    return module, (features(n, seq, width), *angles(seq, width // heads))


@problem(
    "DeepSeek manifold hyper-connections: Sinkhorn iterations on matrices of 4 × 4, four streams",
    TEXT,
    FEW,
)
def doubly_stochastic_streams(n, seq, width):
    hc, eps = 4, 1e-6

    def mixes(m, x):
        flat = x.flatten(2).float()
        rsqrt = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        mixed = F.linear(flat, m.mixing.float()) * rsqrt
        pre, post, comb = mixed.split([hc, hc, hc * hc], dim=-1)
        scale, base = m.scale.float(), m.base.float()
        pre = torch.sigmoid(pre * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(post * scale[1] + base[hc : 2 * hc])
        comb = (comb * scale[2] + base[2 * hc :]).view(n, seq, hc, hc).softmax(dim=-1) + eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        for _ in range(7):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        return pre, post, comb

    def forward(m, x):
        pre, post, comb = mixes(m, x)
        h = m.norm(torch.sum(pre.unsqueeze(-1) * x.float(), dim=2).to(x.dtype))
        h = m.down(F.silu(m.gate(h)) * m.up(h))
        kept = torch.sum(comb.unsqueeze(-1) * x.float().unsqueeze(-2), dim=2)
        return (post.unsqueeze(-1) * h.float().unsqueeze(-2) + kept).type_as(x)

    parts = plain(gate=(width, 2 * width), up=(width, 2 * width), down=(2 * width, width))
    parts |= dict(mixing=nn.Parameter(torch.randn(2 * hc + hc * hc, hc * width) / width**0.5))
    parts |= dict(scale=nn.Parameter(torch.full((3,), 0.3)), norm=RMSNorm(width))
    module = Called(forward, **parts, base=nn.Parameter(torch.randn(2 * hc + hc * hc) * 0.5))
    return module, (features(n, seq, hc, width),)


@problem(
    "Motif PolyNorm MLP: normed first, second and third powers of the gate, weighted",
    TEXT,
    FEW,
    "infer bf16, train f32, train bf16",
)
def normed_powers_mlp(n, seq, width):
    def norm(x):
        return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-6)

    def poly(x, weight, bias):
        return weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias

    def forward(m, x):
        h = m.norm(x)
        return x + m.down(poly(m.gate(h), m.weight, m.bias) * m.up(h))

    parts = plain(gate=(width, 3 * width), up=(width, 3 * width), down=(3 * width, width))
    parts |= dict(weight=nn.Parameter(torch.ones(3) / 3), bias=nn.Parameter(torch.zeros(1)))
    return Called(forward, **parts, norm=RMSNorm(width)), (features(n, seq, width),)


@problem(
    "expert choice routing: every expert takes the tokens it scores highest, added back by index",
    dict(tokens=8192, width=1024, experts=16),
    dict(tokens=16, width=16, experts=4),
)
def expert_choice_layer(tokens, width, experts):
    capacity = 2 * tokens // experts

    def forward(m, x):
        h = m.norm(x)
        scores = F.linear(h.float(), m.router.float()).softmax(dim=-1)
        gates, at = torch.topk(scores.t(), capacity, dim=-1)
        picked = h[at.reshape(-1)].view(experts, capacity, width)
        y = torch.bmm(F.gelu(torch.bmm(picked, m.w1), approximate="tanh"), m.w2)
        y = y * gates.unsqueeze(-1).to(y.dtype)
        out = torch.zeros_like(x)
        out.index_add_(0, at.reshape(-1), y.reshape(-1, width))
        usage = torch.zeros(tokens, device=x.device).scatter_add_(
            0, at.reshape(-1), torch.ones(experts * capacity, device=x.device)
        )
        return x + out, (usage == 0).float().mean()

    shapes = dict(w1=(experts, width, 2 * width), w2=(experts, 2 * width, width))
    parts = {k: nn.Parameter(torch.randn(s) / s[1] ** 0.5) for k, s in shapes.items()}
    parts |= dict(router=nn.Parameter(torch.randn(experts, width) / width**0.5))
    return Called(forward, **parts, norm=nn.LayerNorm(width)), (features(tokens, width),)


@problem(
    "PEFT DoRA: weights' norms without gradient, learnt magnitudes, products through an identity",
    dict(n=8, seq=1024, width=1024),
    FEW,
    ALL,
)
def magnitude_adapter(n, seq, width):
    def adapted(m, name, x):
        base, down, up = (m.get_submodule(f"{name}{part}") for part in ("", "_a", "_b"))
        result = base(x)
        eye = torch.eye(width, device=x.device, dtype=x.dtype)
        weight = base.weight + 2.0 * up(down(eye)).T
        norm = torch.linalg.norm(weight, dim=1).to(weight.dtype).detach()
        scale = (m.get_parameter(f"{name}_m") / norm).view(1, -1)
        frozen = F.linear(x, base.weight)
        return result + (scale - 1) * frozen + scale * up(down(x)) * 2.0

    def forward(m, x):
        return F.silu(adapted(m, "gate", x)) * adapted(m, "up", x)

    parts = {}
    for name in ("gate", "up"):
        parts[name] = nn.Linear(width, 2 * width).requires_grad_(False)
        parts |= plain(**{f"{name}_a": (width, 16), f"{name}_b": (16, 2 * width)})
        magnitude = torch.linalg.norm(parts[name].weight.detach(), dim=1)
        parts[f"{name}_m"] = nn.Parameter(magnitude)
    return Called(forward, **parts), (features(n, seq, width),)
