"""Draw how the gradient of a transformer's last layer depends on its depth, with the norm before and after each block.

Xiong et al. 2020 (arXiv 2002.04745): at initialisation it falls like 1/√(1 + cL) with Pre-LN, where c is the variance
that a layer adds to the residual stream, and it does not fall with Post-LN.

    python examples/preln_postln_gain.py preln_postln_gain.png
"""

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn

from gradtrack import GradientGainMonitor

mpl.use("Agg")
from matplotlib import pyplot as plt

WIDTH, CLASSES, TOKENS = 64, 50, 16
ADDED = 1 / TOKENS + 0.4 * 0.5 * 1.6  # a mean over the tokens, and ReLU between Xavier weights 64 to 256 to 64


def layers(depth: int, pre_norm: bool) -> nn.ModuleList:
    """Return encoder layers with Xavier weights whose queries and keys are zero, so that attention is uniform."""
    blocks = nn.ModuleList()
    for _ in range(depth):
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, norm_first=pre_norm, batch_first=True)
        for name, param in block.named_parameters():
            if param.ndim == 2 and "in_proj" not in name:
                nn.init.xavier_normal_(param)
            elif "bias" in name:
                nn.init.zeros_(param)
        with torch.no_grad():
            block.self_attn.in_proj_weight[: 2 * WIDTH] = 0
            nn.init.xavier_normal_(block.self_attn.in_proj_weight[2 * WIDTH :])
        blocks.append(block)
    return blocks


def last_gradient(depth: int, pre_norm: bool, *, seed: int) -> tuple[float, GradientGainMonitor]:
    """Return the norm of the last layer's W₂ gradient, and the monitor that watched the layers."""
    torch.manual_seed(seed)
    blocks, final = layers(depth, pre_norm), nn.LayerNorm(WIDTH) if pre_norm else nn.Identity()
    head = torch.randn(WIDTH, CLASSES) * (2 / (WIDTH + CLASSES)) ** 0.5
    h, targets = torch.randn(8, TOKENS, WIDTH), torch.randint(CLASSES, (8 * TOKENS,))
    with GradientGainMonitor(blocks) as monitor:
        for block in blocks:
            h = block(h)
        nn.functional.cross_entropy((final(h) @ head).flatten(0, 1), targets).backward()
    return float(blocks[-1].linear2.weight.grad.norm()), monitor


def decay(pre_norm: bool, *, shallow: int = 2, deep: int = 16, seeds: int = 6) -> float:
    """Return the mean ratio of a shallow model's gradient to that of a deep one."""
    pairs = [[last_gradient(depth, pre_norm, seed=seed)[0] for depth in (shallow, deep)] for seed in range(seeds)]
    return sum(first / second for first, second in pairs) / seeds


def main(path: Path, depths: tuple[int, ...] = (2, 4, 8, 16), seeds: int = 12) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for pre_norm, name in ((True, "Pre-LN"), (False, "Post-LN")):
        norms = [sum(last_gradient(depth, pre_norm, seed=seed)[0] for seed in range(seeds)) / seeds for depth in depths]
        left.loglog(depths, [norm / norms[0] for norm in norms], "o-", label=name)
        right.semilogy(last_gradient(depths[-1], pre_norm, seed=0)[1].cumulative_gains(), ".-", label=name)
        print(f"{name}: {', '.join(f'L={depth}: {norm:.4f}' for depth, norm in zip(depths, norms, strict=True))}")
    theory = [((1 + ADDED * depths[0]) / (1 + ADDED * depth)) ** 0.5 for depth in depths]
    left.loglog(depths, theory, "k--", label="theory for Pre-LN: 1/√(1 + cL)")
    left.set_xticks(depths, [str(depth) for depth in depths])
    left.set_xticks([], minor=True)
    left.set(xlabel="layers L", ylabel="gradient of the last W₂, relative", title="Last layer over depth")
    right.set(xlabel="block", ylabel="gradient, relative to the last block", title=f"Along {depths[-1]} layers")
    left.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "preln_postln_gain.png"))
