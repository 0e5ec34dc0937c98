"""A small GPT: attention entropy and gradient norms per block, with analyzers that choose themselves.

python examples/gpt.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

LENGTH, VOCABULARY = 24, 48


class Gpt(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        size = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size)
        x = self.token(tokens) + self.place(torch.arange(size))
        found: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return found


def main(steps: int = 40) -> GradientManager:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with GradientManager(backends=["memory"], analyzers="auto", grad_log_every_n_steps=8) as manager:
        manager.attach(model, optimizer)
        for _ in range(steps):
            start = torch.randint(0, VOCABULARY, (16, 1))
            tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
            optimizer.zero_grad()
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            report = safe_backward(loss, model, optimizer, manager)
            optimizer.step()
        print(manager.reports[0].notes)
        for name, value in report.metrics().items():
            print(f"{name} {value:.5g}")
    return manager


if __name__ == "__main__":
    main()
