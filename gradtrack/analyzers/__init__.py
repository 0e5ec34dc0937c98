"""Panels beyond the gradients themselves: one file per analyzer."""
