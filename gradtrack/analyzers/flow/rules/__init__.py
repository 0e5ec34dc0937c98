"""The rules over sampled evidence, by what they are about."""
