"""Rules over windows of evidence, root causes and recommendations."""
