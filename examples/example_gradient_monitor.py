"""Seven ways to use the gradient gain monitor.

python examples/example_gradient_monitor.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradtrack import GradientGainMonitor

WIDTH = 32


class ResidualBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int = WIDTH, *, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.pre_norm:
            x = x + self.attend(first(x))
            return x + self.mix(second(x))
        return second(self.mix(h := first(x + self.attend(x))) + h)

    def attend(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def loss_of(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x.square().mean()


def residual_blocks() -> None:
    blocks = nn.ModuleList(ResidualBlock() for _ in range(6))
    with GradientGainMonitor(blocks) as monitor:
        loss_of(blocks, torch.randn(8, WIDTH)).backward()
        print(monitor.report())


def pre_norm_against_post_norm() -> None:
    for name, pre_norm in (("Pre-LN", True), ("Post-LN", False)):
        torch.manual_seed(42)
        blocks = nn.ModuleList(TransformerBlock(pre_norm=pre_norm) for _ in range(8))
        with GradientGainMonitor(blocks) as monitor:
            loss_of(blocks, torch.randn(4, 16, WIDTH)).backward()
            print(f"{name}: mean_gain={monitor.summary_stats()['mean_gain']:.4f}")


def four_norms() -> None:
    blocks = nn.ModuleList(ResidualBlock() for _ in range(4))
    batch = torch.randn(8, WIDTH)
    for norm_type in ("l2", "l1", "linf", "mean"):
        with GradientGainMonitor(blocks, norm_type=norm_type) as monitor:
            loss_of(blocks, batch).backward()
            print(f"{norm_type:>4}: {', '.join(f'{norm:.2e}' for norm in monitor.norms())}")


def training_loop() -> None:
    blocks = nn.ModuleList(ResidualBlock() for _ in range(4))
    optimizer = torch.optim.Adam(blocks.parameters(), lr=1e-3)
    monitor = GradientGainMonitor(blocks, strict_single_backward=False)
    for step in range(201):
        optimizer.zero_grad()
        loss_of(blocks, torch.randn(8, WIDTH)).backward()
        if step % 100 == 0:
            print(f"step {step}: gain per block {monitor.gain_per_block().gain_per_block:.4f}")
        optimizer.step()
        monitor.reset()
    monitor.close()


def gradient_accumulation() -> None:
    blocks = nn.ModuleList(ResidualBlock() for _ in range(4))
    with GradientGainMonitor(blocks) as monitor:
        for index, micro_batch in enumerate(torch.randn(4, 8, WIDTH)):
            (loss_of(blocks, micro_batch) / 4).backward()
            print(f"micro-batch {index}: {monitor.summary_stats()['mean_gain']:.4f}")
            monitor.reset()


def flow_problem() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(8))
    with GradientGainMonitor(blocks) as monitor:
        loss_of(blocks, torch.randn(8, WIDTH)).backward()
    stats = monitor.summary_stats()
    if stats["num_damping"] > len(blocks) // 2:
        print(f"vanishing: {stats['num_damping']} damping transitions, {monitor.cumulative_gains()[0]:.1e} is left")


def log_gains_for_a_plot() -> None:
    blocks = nn.ModuleList(ResidualBlock() for _ in range(8))
    with GradientGainMonitor(blocks) as monitor:
        loss_of(blocks, torch.randn(8, WIDTH)).backward()
    for index, log_gain in enumerate(monitor.log_gains()):
        bar = "#" * round(200 * abs(log_gain))
        print(f"{index} to {index + 1}: {log_gain:+.4f} {bar}")


EXAMPLES = (
    *(residual_blocks, pre_norm_against_post_norm, four_norms, training_loop),
    *(gradient_accumulation, flow_problem, log_gains_for_a_plot),
)

if __name__ == "__main__":
    torch.manual_seed(0)
    for number, example in enumerate(EXAMPLES, start=1):
        print(f"\n--- {number}. {example.__name__.replace('_', ' ')}")
        example()
