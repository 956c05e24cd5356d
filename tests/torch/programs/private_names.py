"""Prints the rows of the table of PyTorch's private names in docs/pytorch-versions.md."""

from unisono.torch_internals import catalog

for module, names in catalog.names().items():
    for name in names:
        since = f"{name.since} with {name.build}".strip() if name.build else name.since
        path = name.path.replace(":", ".").replace("torch.distributed.", "dist.")
        print(f"| `{path}` | {module} | {name.purpose} | {name.without} | {since} | {name.until} |")
