"""Models as people write them, without a library: their names and their code fit no rule."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, WORDS, TIME = 32, 4, 64, 8
CATEGORIES, STATES = 5000, 4


class NanoAttention(nn.Module):
    """Fused query, key and value; the number of heads and the width are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(rows, time, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        mixed = functional.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(rows, time, width))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), NanoAttention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class Nano(nn.Module):
    """A GPT in one file, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList(Residual(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """A block of a ResNet-50: three convolutions, a BatchNorm after each, and a shortcut."""

    def __init__(self, came: int, inner: int, goes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(came, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, goes, 1, bias=False), nn.BatchNorm2d(goes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(came, goes, 1, stride, bias=False), nn.BatchNorm2d(goes))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class BatchNormResNet(nn.Module):
    """A ResNet-50 in small, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 8, 16, 1), Bottleneck(16, 8, 16, 1))
        self.layer2 = nn.Sequential(Bottleneck(16, 16, 32, 2), Bottleneck(32, 16, 32, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class UNet(nn.Module):
    """Skip connections across all levels; convolutions are cut by channel, and their norms by group."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.mid1, self.mid2 = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out, self.head = nn.Conv2d(16, 4, 3, padding=1), nn.Linear(4 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.silu(self.down1(x))
        second = functional.silu(self.norm(self.down2(first)))
        middle = self.mid2(functional.silu(self.mid1(second)))
        up = self.up(second + middle)
        return self.head(self.out(torch.cat([first, up], dim=1)).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Scan(nn.Module):
    """A selective state-space layer as in Mamba: its state is a loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.step, self.select = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * STATES)
        self.decay = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(2 * WIDTH, 1))
        self.skip, self.head = nn.Parameter(torch.ones(2 * WIDTH)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inner, gate = self.into(self.norm(x)).chunk(2, -1)
        inner = functional.silu(inner)
        step = functional.softplus(self.step(inner)).unsqueeze(-1)
        enter, leave = self.select(inner).chunk(2, -1)
        kept = torch.exp(-step * self.decay.exp())
        added = step * enter.unsqueeze(-2) * inner.unsqueeze(-1)
        state, found = torch.zeros_like(added[:, 0]), []
        for at in range(tokens.shape[1]):
            state = kept[:, at] * state + added[:, at]
            found.append((state * leave[:, at].unsqueeze(-2)).sum(-1))
        mixed = (torch.stack(found, 1) + inner * self.skip) * functional.silu(gate)
        return self.head(x + self.out(mixed))


class Translator(nn.Module):
    """An encoder and a decoder of LSTM cells, with dot-product attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.encoder, self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LSTMCell(WIDTH, WIDTH)
        self.mix, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, (last, memory) = self.encoder(self.source(source))
        hidden, memory, found = last[0], memory[0], []
        for word in self.target(target).unbind(1):
            hidden, memory = self.cell(word, (hidden, memory))
            weights = (states @ hidden.unsqueeze(-1)).softmax(1)
            context = (weights * states).sum(1)
            found.append(torch.tanh(self.mix(torch.cat([hidden, context], -1))))
        return self.head(torch.stack(found, 1))


class Dlrm(nn.Module):
    """Big tables of categories, an MLP of dense features, pairwise products, and an MLP over both."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CATEGORIES, 16) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(10 + 16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        low = self.bottom(dense)
        rows = torch.stack([low, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        first, second = torch.triu_indices(5, 5, 1, device=dense.device)
        return self.top(torch.cat([low, products[:, first, second]], 1))


class Mixer(nn.Module):
    """An MLP over tokens and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(TIME, 16), nn.GELU(), nn.Linear(16, TIME))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.channels(self.norms[1](x)))


class GatedExperts(nn.Module):
    """A soft mixture: all experts run, a router weighs them. Bare parameters with an expert dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.first = nn.Parameter(torch.randn(4, WIDTH, 48) * 0.1)
        self.second = nn.Parameter(torch.randn(4, 48, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(torch.einsum("btd,edf->btef", x, self.first))
        outer = torch.einsum("btef,efd->bted", inner, self.second)
        return (outer * self.router(x).softmax(-1).unsqueeze(-1)).sum(2)


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.experts, self.head = GatedExperts(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.experts(self.norm(x)))


class TwoLosses(nn.Module):
    """Words and a class of each text, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)
        )
        self.words, self.kind = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.body(tokens)
        return {"words": self.words(hidden), "kind": self.kind(hidden.mean(1))}


class MultiQuery(nn.Module):
    """One key and value for all heads, a scale for each head, and norms within heads."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, size), nn.Linear(WIDTH, size)
        self.q_norm, self.k_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.o, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        here = self.norm(x)
        q = self.q_norm(self.q(here).unflatten(-1, (HEADS, -1))).transpose(1, 2) * self.scale
        k, v = self.k_norm(self.k(here)).unsqueeze(1), self.v(here).unsqueeze(1)
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return self.head(x + self.o(mixed.transpose(1, 2).reshape(*x.shape)))


class Sliced(nn.Module):
    """Query, key and value are slices of one bare weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.zeros(3 * WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        parts = (slice(0, WIDTH), slice(WIDTH, 2 * WIDTH), slice(-WIDTH, None))
        q, k, v = (functional.linear(x, self.weight[part], self.bias[part]) for part in parts)
        return self.head(x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Hooked(nn.Module):
    """Hooks: on a parameter, before a layer, and after one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))
        self.layers[0].register_forward_hook(lambda _, args, output: output * 1.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Between(nn.Module):
    """The layers have the usual names; a softmax over what would be cut is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1, self.fc2 = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.embed(tokens)).softmax(-1))


class Seq2Seq(nn.Module):
    """torch.nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.head(
            self.body(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        )


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder, which has the names that rules know."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))
