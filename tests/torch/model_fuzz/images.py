# ruff: noqa: E501  (templates of one line)
"""Statements over the last dims, with channels in dim 1: convolutions, pools, other sizes, windows."""

from .writer import Writer


def _dims(w: Writer) -> tuple[str, int, int]:
    """A value with channels, how many, and how many dims follow."""
    x = w.last()
    shape = w.shape(x)
    if len(shape) not in (3, 4):
        raise ValueError
    return x, shape[1], len(shape) - 2


def filtered(w: Writer) -> str:
    """Convolutions of every kind."""
    x, channels, dims = _dims(w)
    groups = w.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    out, bias = groups * w.rng.choice((1, 2, 3)), w.rng.random() < 0.6
    wide = w.rng.choice((4, 6, 8))
    kind, turned = f"nn.Conv{dims}d({channels}", f"nn.ConvTranspose{dims}d({channels}"
    made = w.rng.choice(
        (
            f"{kind}, {out}, 3, padding=2, dilation=2, groups={groups}, bias={bias})",
            f"{kind}, {out}, 2, stride=2, groups={groups}, bias={bias})",
            f"{kind}, {2 * channels}, 3, padding=1, groups={channels}, bias={bias})",
            f"{kind}, {wide}, 3, padding='same', bias={bias})",
            f"{kind}, {wide}, 3, padding=1, padding_mode='circular', bias={bias})",
            f"{kind}, {wide}, 2, padding='valid')",
            f"{turned}, {out}, 2, stride=2, groups={groups}, bias={bias})",
            f"{turned}, {out}, 3, padding=1, dilation=1, groups={groups}, bias={bias})",
            f"{turned}, {wide}, 3, stride=2, padding=1, output_padding=1, bias={bias})",
            f"{turned}, {channels}, 2, groups={channels}, bias={bias})",
            f"nn.Sequential({kind}, {wide}, 1), nn.ReLU(), nn.Conv{dims}d({wide}, {channels}, 1))",
            f"nn.Sequential({kind}, {channels}, 3, padding=1, groups={channels}), {kind}, {wide}, 1))",
        )
    )
    if w.rng.random() < 0.25:
        weight = w.parameter(wide, channels, *[2] * dims)
        return w.rng.choice(
            (
                f"functional.conv{dims}d({x}, {weight}, padding=1)",
                f"functional.conv{dims}d({x}, {weight} - {weight}.mean((1, 2), keepdim=True))",
                f"functional.conv_transpose{dims}d({x}, {weight}.transpose(0, 1))",
            )
        )
    return f"{w.held('c', made)}({x})"


def resized(w: Writer) -> str:
    """Pools, interpolation, pixels to channels and back, windows."""
    x, channels, dims = _dims(w)
    gate = w.held("c", f"nn.Conv{dims}d({channels}, {channels}, 1)")
    forms = [
        f"functional.max_pool{dims}d({x}, 2, stride=1)",
        f"functional.avg_pool{dims}d({x}, 3, stride=1, padding=1)",
        f"functional.lp_pool{dims}d({x}, 2, 2)",
        f"functional.adaptive_max_pool{dims}d({x}, 2)",
        f"functional.adaptive_avg_pool{dims}d({x}, 1) + {x}",
        f"functional.interpolate({x}, scale_factor=2, mode='nearest')",
        f"functional.interpolate({x}, size={'5' if dims == 1 else '(5, 3)'}, mode='{'linear' if dims == 1 else 'bilinear'}')",
        f"{x} * torch.sigmoid({gate}({x}.mean({-1 if dims == 1 else '(-2, -1)'}, keepdim=True)))",
        f"functional.instance_norm({x})",
        f"{w.held('m', f'nn.GroupNorm({2 - channels % 2}, {channels})')}({x})",
        f"functional.channel_shuffle({x}, 2)" if dims == 2 else f"{x}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)",
        f"functional.layer_norm({x}, {x}.shape[1:])",
        f"functional.pad({x}, {(1, 1) * dims}, mode='replicate')",
        f"functional.pad({x}, {(1, 0) * dims}, mode='circular')",
    ]  # fmt: skip
    if dims == 2:
        forms += [
            f"functional.pixel_shuffle({x}, 2)",
            f"functional.pixel_unshuffle({x}, 2)",
            f"functional.unfold({x}, 2)",
            f"functional.fold(functional.unfold({x}, 2, stride=2), {x}.shape[-2:], 2, stride=2)",
            f"functional.interpolate({x}, scale_factor=2, mode='bicubic')",
            f"{x}.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)",
            f"{x}.flatten(2).transpose(1, 2)",
            f"functional.grid_sample({x}, torch.linspace(-1, 1, 8).view(1, 2, 2, 2).expand({x}.shape[0], 2, 2, 2), align_corners=False)",
        ]
    else:
        forms.append(f"{x}.unfold(-1, 2, 2).flatten(-2)")
    return w.rng.choice(forms)
