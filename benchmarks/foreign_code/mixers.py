"""Parts of language models other than attention: gates, experts, recurrences and states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm
from benchmarks.foreign_code.problems import ALL, Called, features, problem

TEXT, FEW = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)
TOKENS, FEW_TOKENS = dict(tokens=4096, width=1024, experts=8), dict(tokens=12, width=16, experts=4)


@problem("transformers gpt-oss experts: interleaved gate and up, both clamped", TOKENS, FEW_TOKENS)
def clamped_swiglu_experts(tokens, width, experts):
    def forward(m, x, router):
        x = x.repeat(experts, 1).view(experts, -1, width)
        gate_up = torch.bmm(x, m.gate_up) + m.gate_up_bias[..., None, :]
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=7.0)
        up = up.clamp(min=-7.0, max=7.0)
        glu = gate * torch.sigmoid(gate * 1.702)
        y = torch.bmm(((up + 1) * glu), m.down) + m.down_bias[..., None, :]
        y = y * router.transpose(0, 1)[..., None]
        return y.sum(dim=0)

    shapes = dict(gate_up=(experts, width, 2 * width), gate_up_bias=(experts, 2 * width))
    shapes |= dict(down=(experts, width, width), down_bias=(experts, width))
    parts = {name: nn.Parameter(torch.randn(shape) * 0.1) for name, shape in shapes.items()}
    router = torch.rand(tokens, experts)
    return Called(forward, **parts), (features(tokens, width), router)


@problem(
    "transformers Llama4 experts: inputs scaled by sigmoid scores, batched products, shared expert",
    TOKENS,
    FEW_TOKENS,
)
def scaled_input_experts(tokens, width, experts):
    def forward(m, x):
        logits = m.router(x)
        top, at = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, at, top).transpose(0, 1)
        scores = torch.sigmoid(scores.float()).to(x.dtype)
        routed = x.repeat(experts, 1) * scores.reshape(-1, 1)
        gate, up = torch.bmm(routed.view(experts, -1, width), m.gate_up).chunk(2, dim=-1)
        y = torch.bmm(up * F.silu(gate), m.down).reshape(experts, -1, width)
        shared = m.shared_down(F.silu(m.shared_gate(x)) * m.shared_up(x))
        return shared.add_(y.sum(dim=0))

    parts = dict(router=nn.Linear(width, experts, bias=False))
    sizes = dict(shared_gate=(1, 2), shared_up=(1, 2), shared_down=(2, 1))
    parts |= {k: nn.Linear(a * width, b * width, bias=False) for k, (a, b) in sizes.items()}
    parts |= dict(gate_up=nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05))
    parts |= dict(down=nn.Parameter(torch.randn(experts, width, width) * 0.05))
    return Called(forward, **parts), (features(tokens, width),)


@problem(
    "DeepSeek-V3 router: sigmoid scores, a correction, best groups, top-8, renormalised",
    dict(tokens=16384, width=2048, experts=256),
    dict(tokens=12, width=16, experts=32),
)
def grouped_router(tokens, width, experts):
    groups = 8

    def forward(m, x):
        logits = F.linear(x.type(torch.float32), m.weight.type(torch.float32))
        scores = logits.sigmoid()
        choice = scores.detach() + m.correction
        best = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
        at = torch.topk(best, k=groups // 2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best).scatter_(1, at, 1)
        mask = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
        at = torch.topk(choice.masked_fill(~mask.bool(), 0.0), k=8, dim=-1, sorted=True)[1]
        weights = scores.gather(1, at)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * 2.5

    module = Called(forward, weight=nn.Parameter(torch.randn(experts, width) / width**0.5))
    module.register_buffer("correction", torch.randn(experts) * 0.1)
    return module, (features(tokens, width),)


@problem(
    "Switch Transformers router: capacity by cumulative sums of one-hot choices, z-loss",
    dict(n=16, seq=2048, width=768),
    FEW,
)
def switch_router(n, seq, width):
    experts, capacity = 16, max(2, seq // 8)

    def forward(m, x):
        logits = m.classifier(x.to(torch.float32).to(x.dtype))
        probs = F.softmax(logits, dim=-1, dtype=torch.float32).to(x.dtype)
        chosen = F.one_hot(torch.argmax(probs, dim=-1), num_classes=experts)
        place = torch.cumsum(chosen, dim=-2)
        chosen = chosen * (place <= capacity)
        best = torch.max(probs, dim=-1).values.unsqueeze(-1)
        z = torch.mean(torch.logsumexp(logits, dim=-1) ** 2)
        return best * chosen, z

    return Called(forward, classifier=nn.Linear(width, experts, bias=False)), (
        features(n, seq, width),
    )


@problem(
    "transformers Nemotron MLP: layer norm of 1 + weight, squared relu, residual multiplier",
    TEXT,
    FEW,
)
def squared_relu_mlp(n, seq, width):
    def forward(m, x):
        h = F.layer_norm(x, (width,), m.weight + 1, m.bias, 1e-5)
        return x + m.down(F.relu(m.up(h)).pow(2)) * 0.22

    parts = dict(up=nn.Linear(width, 4 * width, bias=False))
    parts |= dict(down=nn.Linear(4 * width, width, bias=False))
    parts |= dict(weight=nn.Parameter(torch.zeros(width)), bias=nn.Parameter(torch.zeros(width)))
    return Called(forward, **parts), (features(n, seq, width),)


@problem("transformers Phi-3 MLP behind OLMo-2 norms: one product, up before gate", TEXT, FEW)
def gate_up_post_norm(n, seq, width):
    def forward(m, x):
        up_states = m.gate_up(x)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * F.silu(gate)
        return m.norm2(m.down(up_states)) + x, m.norm1(x)[:, -1]

    parts = dict(gate_up=nn.Linear(width, 6 * width, bias=False))
    parts |= dict(down=nn.Linear(3 * width, width, bias=False))
    return Called(forward, **parts, norm1=RMSNorm(width), norm2=RMSNorm(width)), (
        features(n, seq, width),
    )


@problem(
    "transformers LLaVA-NeXT / PEFT: a product with a low-rank one beside it, frozen weights",
    TEXT,
    FEW,
)
def low_rank_adapter(n, seq, width):
    def forward(m, x):
        result = m.base(x)
        result = result + m.b(m.a(F.dropout(x.to(m.a.weight.dtype), 0.0, m.training))) * 2.0
        gate = F.silu(result)
        return gate * m.up(x)

    parts = dict(base=nn.Linear(width, 4 * width), up=nn.Linear(width, 4 * width))
    parts |= dict(a=nn.Linear(width, 16, bias=False), b=nn.Linear(16, 4 * width, bias=False))
    module = Called(forward, **parts)
    for part in (module.base, module.up):
        part.requires_grad_(False)
    return module, (features(n, seq, width),)


@problem(
    "RWKV-6 time mixing: interpolations of low rank, group norm of heads, silu gate",
    dict(n=8, seq=1024, width=768),
    FEW,
)
def rwkv_time_mixing(n, seq, width):
    heads = max(2, width // 64)

    def forward(m, x, wkv):
        xx = F.pad(x, (0, 0, 1, -1)) - x
        xxx = x + xx * m.maa_x
        xxx = torch.tanh(xxx @ m.w1).view(n * seq, 2, -1).transpose(0, 1)
        mr, mg = torch.bmm(xxx, m.w2).view(2, n, seq, width).unbind(dim=0)
        r = m.r(x + xx * (m.maa_r + mr))
        g = F.silu(m.g(x + xx * (m.maa_g + mg)))
        y = (r.view(n, seq, heads, -1) * wkv.view(n, seq, heads, -1)).view(n * seq, width)
        y = m.ln_x(y).view(n, seq, width)
        return m.o(y * g)

    parts = {name: nn.Linear(width, width, bias=False) for name in "rgo"}
    mixes = {f"maa_{name}": nn.Parameter(torch.rand(1, 1, width)) for name in "xrg"}
    parts |= dict(w1=nn.Parameter(torch.randn(width, 32) * 0.1))
    parts |= dict(w2=nn.Parameter(torch.randn(2, 16, width) * 0.1))
    return Called(forward, **parts, **mixes, ln_x=nn.GroupNorm(heads, width, eps=64e-5)), (
        features(n, seq, width),
        features(n, seq, width),
    )


@problem(
    "Mamba-2 minimal: the masked matrix of a chunk by cumulative sums, grouped gated norm",
    dict(n=8, chunks=16, length=64, heads=16, d=64),
    dict(n=2, chunks=2, length=4, heads=2, d=8),
)
def state_space_chunk(n, chunks, length, heads, d):
    def segsum(x):
        x = x[..., None].expand(*x.shape, length)
        mask = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool), -1)
        total = torch.cumsum(x.masked_fill(~mask, 0), dim=-2)
        mask = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool), 0)
        return total.masked_fill(~mask, -torch.inf)

    def forward(m, x, b, c, dt, z):
        dt = F.softplus(dt + m.dt_bias)
        a = (-torch.exp(m.a_log.float()) * dt).permute(0, 3, 1, 2)
        decay = torch.exp(segsum(a)).to(x.dtype)
        weights = torch.einsum("bclhn,bcshn->bhcls", c, b) * decay
        y = torch.einsum("bhcls,bcshp->bclhp", weights, x * dt[..., None]) + x * m.d[:, None]
        y = y.reshape(n, chunks * length, heads * d) * F.silu(z)
        grouped = y.view(n, chunks * length, 2, -1).float()
        grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + 1e-5)
        return m.weight * grouped.view_as(y).to(x.dtype)

    parts = {name: nn.Parameter(torch.rand(heads)) for name in ("dt_bias", "a_log", "d")}
    parts |= dict(weight=nn.Parameter(torch.ones(heads * d)))
    shapes = (heads, d), (heads, d), (heads, d), (heads,)
    return Called(forward, **parts), (
        *(features(n, chunks, length, *shape) for shape in shapes),
        features(n, chunks * length, heads * d),
    )


@problem(
    "RecurrentGemma RG-LRU: gates by block-diagonal products, sqrt(1 - a²), a short convolution",
    dict(n=8, seq=1024, width=1280),
    FEW,
)
def gated_linear_recurrence(n, seq, width):
    heads = 4
    d = width // heads

    def gate(x, weight, bias):
        flat = x.reshape(n * seq, heads, d).permute(1, 0, 2)
        y = torch.baddbmm(bias[:, None, :], flat, weight).permute(1, 0, 2)
        return torch.sigmoid(y.reshape(n, seq, width))

    def forward(m, x):
        h = m.norm(x)
        y = F.gelu(m.y(h), approximate="tanh")
        u = m.conv(m.x(h).transpose(1, 2))[..., :seq].transpose(1, 2)
        inside = gate(u, m.in_weight, m.in_bias)
        log_a = -8.0 * gate(u, m.a_weight, m.a_bias) * F.softplus(m.a_param)
        a = torch.exp(log_a)
        normed = u * inside * torch.sqrt(1 - torch.exp(2 * log_a) + 1e-6).type(u.dtype)
        state = normed + a * F.pad(normed, (0, 0, 1, -1))
        return x + m.out(state * y)

    parts = {name: nn.Linear(width, width) for name in ("x", "y", "out")}
    parts |= {f"{k}_weight": nn.Parameter(torch.randn(heads, d, d) / d**0.5) for k in ("in", "a")}
    parts |= {f"{k}_bias": nn.Parameter(torch.zeros(heads, d)) for k in ("in", "a")}
    parts |= dict(a_param=nn.Parameter(torch.rand(width)), norm=RMSNorm(width, True))
    parts |= dict(conv=nn.Conv1d(width, width, 4, padding=3, groups=width))
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "xLSTM mLSTM: parallel stabilised gates, cumulative log-sigmoids, norm of heads",
    dict(n=16, seq=512, heads=4, d=256),
    dict(n=2, seq=8, heads=2, d=8),
)
def matrix_lstm(n, seq, heads, d):
    def forward(m, q, k, v, i, f):
        log_f = F.logsigmoid(f.float()).cumsum(dim=-2)
        matrix = log_f - log_f.transpose(-2, -1) + i.float().transpose(-2, -1)
        keep = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
        matrix = torch.where(keep, matrix, -float("inf"))
        largest, _ = torch.max(matrix, dim=-1, keepdim=True)
        decay = torch.exp(matrix - largest).to(q.dtype)
        c = (q @ (k / d**0.5).transpose(-2, -1)) * decay
        size = torch.maximum(c.sum(dim=-1, keepdim=True).abs(), torch.exp(-largest).to(q.dtype))
        h = (c / (size + 1e-6)) @ v
        h = h.transpose(1, 2)
        h = F.group_norm(h.reshape(n * seq, heads * d), heads, weight=m.weight).view(n, seq, -1)
        return h + m.skip * v.transpose(1, 2).reshape(n, seq, -1)

    learnt = {name: nn.Parameter(torch.ones(heads * d)) for name in ("weight", "skip")}
    return Called(forward, **learnt), (
        *(features(n, heads, seq, d) for _ in range(3)),
        *(features(n, heads, seq, 1) for _ in range(2)),
    )


@problem(
    "lucidrains minGRU: a parallel scan in logarithms by logcumsumexp",
    dict(n=16, seq=1024, width=512),
    FEW,
)
def min_gru(n, seq, width):
    def log_g(x):
        return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))

    def forward(m, x):
        hidden, gate = m.both(m.norm(x)).chunk(2, dim=-1)
        log_coefficients = -F.softplus(gate)
        log_values = -F.softplus(-gate) + log_g(hidden)
        a = log_coefficients.float().cumsum(dim=1)
        out = (a + (log_values.float() - a).logcumsumexp(dim=1)).exp()
        return x + m.out(out.to(x.dtype))

    parts = dict(both=nn.Linear(width, 2 * width, bias=False), norm=nn.RMSNorm(width))
    return Called(forward, **parts, out=nn.Linear(width, width, bias=False)), (
        features(n, seq, width),
    )


@problem(
    "BitNet b1.58 linear: rms norm, rounded activations and ternary weights, straight through",
    TEXT,
    FEW,
    ALL,
)
def ternary_linear(n, seq, width):
    def forward(m, x):
        w = m.weight
        h = m.norm(x)
        scale = 127.0 / h.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        rounded = (h * scale).round().clamp_(-128, 127) / scale
        h = h + (rounded - h).detach()
        factor = 1.0 / w.abs().mean().clamp_(min=1e-5)
        ternary = (w * factor).round().clamp_(-1, 1) / factor
        return F.relu(F.linear(h, w + (ternary - w).detach())).square()

    weight = nn.Parameter(torch.randn(2 * width, width) / width**0.5)
    return Called(forward, weight=weight, norm=RMSNorm(width)), (features(n, seq, width),)


@problem(
    "bitsandbytes / GPTQ style MLP: 4-bit weights in int32, scales and zeros by groups",
    dict(tokens=4096, width=2048),
    dict(tokens=6, width=32),
    "infer bf16",
)
def packed_weights(tokens, width):
    group = width // 8

    def weights(m, name):
        shifts = torch.arange(0, 32, 4, device=m.gate.device)
        packed = getattr(m, name)
        q = (packed[:, None, :] >> shifts[None, :, None]) & 15
        q = q.reshape(-1, group, packed.shape[-1])
        w = getattr(m, f"{name}_scale")[:, None] * (q - getattr(m, f"{name}_zero")[:, None])
        return w.reshape(-1, packed.shape[-1])

    def forward(m, x):
        gate, up = x @ weights(m, "gate"), torch.matmul(x, weights(m, "up"))
        return F.silu(gate) * up

    module = Called(forward)
    for name in ("gate", "up"):
        module.register_buffer(name, torch.randint(-(2**31), 2**31 - 1, (width // 8, width)).int())
        module.register_buffer(f"{name}_scale", torch.rand(8, width) / width**0.5)
        module.register_buffer(f"{name}_zero", torch.randint(4, 12, (8, width)))
    return module, (torch.randn(tokens, width),)


@problem(
    "torchao int8 dynamic activations: largest of each token, int8 weights by channels, bias, gelu",
    dict(tokens=8192, width=1024),
    dict(tokens=6, width=32),
    "infer f32, infer bf16",
)
def dynamic_int8_linear(tokens, width):
    def forward(m, x):
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
        q = torch.round(x / scale).clamp(-128, 127).to(torch.int8)
        y = torch.matmul(q.to(x.dtype), m.weight.to(x.dtype).t())
        return F.gelu(y * scale * m.scale + m.bias)

    module = Called(forward, bias=nn.Parameter(torch.randn(4 * width)))
    module.register_buffer("weight", torch.randint(-127, 128, (4 * width, width)).to(torch.int8))
    module.register_buffer("scale", torch.rand(4 * width) / 127 / width**0.5)
    return module, (torch.randn(tokens, width),)
