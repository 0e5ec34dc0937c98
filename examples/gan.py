"""A GAN: two (model, optimizer) pairs in one manager, each with a name, windows and a step count of its own.

python examples/gan.py
"""

from __future__ import annotations

import torch
from torch import nn

from gradtrack import GradientManager, safe_backward


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main(steps: int = 200) -> GradientManager:
    torch.manual_seed(0)
    generator, discriminator = network(4, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    judge = nn.functional.binary_cross_entropy_with_logits
    with GradientManager(backends=["json"], run_dir="gan_run", grad_log_every_n_steps=10) as manager:
        manager.attach(generator, generator_optimizer, name="generator")
        manager.attach(discriminator, discriminator_optimizer, name="discriminator")
        for _ in range(steps):
            real, fake = torch.randn(64, 2) * 0.5 + 1, generator(torch.randn(64, 4))
            scores = discriminator(torch.cat([real, fake.detach()]))
            target = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
            discriminator_optimizer.zero_grad()
            safe_backward(judge(scores, target), discriminator, discriminator_optimizer, manager)
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            loss = judge(discriminator(fake), torch.ones(64, 1))
            safe_backward(loss, generator, generator_optimizer, manager)
            generator_optimizer.step()
        for report in manager.reports[-2:]:
            print(f"{report.source}: step {report.step}, gradient norm {report.clipping.norm_before:.4f}")
    return manager


if __name__ == "__main__":
    main()
