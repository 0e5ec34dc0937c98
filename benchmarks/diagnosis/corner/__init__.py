"""Runs in corners that the other parts leave out: short, tiny, odd losses, own optimizers and late faults."""
